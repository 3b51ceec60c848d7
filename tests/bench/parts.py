"""The parts of the benchmark: what each one runs, what it needs, how long it takes.

A part is measured whole with --full. Without, it runs with fewer seeds or rows (`subset`), so that all parts together
take 20 minutes on two cores, or is left out; what such a run measured is kept under a name of its own and stands in no
document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SUBSET_MINUTES = 20.0
NEEDS: Mapping[str, str] = {
    "sizes": "a table of real sample sizes: --sizes TABLE",
    "media": "a folder of real media: --media DIR",
    "times": "stage times of a GPU, by python -m tests.gpu.real_steps: --times FILE",
    "slurm": "a Slurm that may be given 500 jobs: --slurm",
    "rivals": "packages beside the environment: make rivals",
}
"""What a part may need, and how to give it."""


@dataclass(frozen=True)
class Part:
    """One command."""

    name: str
    what: str
    module: str
    """Run by `python -m` with --json FILE."""
    minutes: float
    """Of the whole part on two cores, about."""
    args: tuple[str, ...] = ()
    """`{stem}` stands for the path of the JSON file without its suffix: for pictures beside it."""
    subset: tuple[str, ...] | None = None
    """Arguments without --full; None: only with it."""
    subset_minutes: float = 0.0
    takes: tuple[str, ...] = ()
    """Options that are handed on where they are given."""
    needs: tuple[str, ...] = ()
    """Of `NEEDS`: without one of them the part is left out. Options among them are handed on, too."""

    def args_of(self, is_full: bool) -> tuple[str, ...]:
        """Its own arguments; a part that has no subset is always whole."""
        return self.args if is_full or self.subset is None else self.subset

    def minutes_of(self, is_full: bool) -> float:
        return self.minutes if is_full or self.subset is None else self.subset_minutes

    def result_name(self, is_full: bool) -> str:
        """Of its file, without the date."""
        return self.name if self.args_of(is_full) == self.args else f"{self.name}-subset"


BENCH = "tests.bench"
SCHEDULE, CORRECT, REGRET = f"{BENCH}.schedule", f"{BENCH}.correct", f"{BENCH}.regret"
MEASURED = ("real", "slow_rank", "replan", "overhead")
PARTS = (
    Part("store", "the store under load", f"{BENCH}.store", 4.0, (), ("--rows", "1000000"), 2.4),
    Part("data", "profiling datasets", f"{BENCH}.data", 4.0, (), ("--samples", "4000"), 2.0, ("sizes", "media")),
    Part("cost", "fitting and predicting costs", f"{BENCH}.cost", 0.1, (), (), 0.1),
    Part("profile", "how well a profile predicts what it did not see", f"{BENCH}.profile", 6.0),
    Part(
        "simulate", "real steps against the simulator", f"{BENCH}.simulate", 8.0, (),
        ("--budget", "30", "--batches", "2", "--rounds", "2", "--case", "0", "4", "6"), 1.7,
    ),
    Part(
        "engine", "the engine beside plain Hugging Face", f"{BENCH}.engine", 5.0, (), ("--part", "race"), 4.4,
        ("sizes",),
    ),
    Part("plan", "what planning takes", f"{BENCH}.plan", 1.1, (), (), 1.1),
    Part(
        "launch", "submitting and watching jobs, on a Slurm that is played", f"{BENCH}.launch", 3.5, (),
        ("--num-jobs", "100", "--duration-s", "15"), 0.6,
    ),
    Part(
        "launch-slurm", "the same 500 jobs on a real Slurm", f"{BENCH}.launch", 5.0, ("--real",), needs=("slurm",)
    ),
    Part("suite", "the paper's models on data-sheet costs, simulated", f"{BENCH}.suite", 3.5,
         ("--picture", "{stem}.svg")),
    Part(
        "reference", "the reference's rule, re-expressed, simulated", REGRET, 3.0, ("--part", "reference"),
        takes=("sizes",),
    ),
    Part(
        "regret", "how far the planner is from the best, simulated", REGRET, 25.0, ("--part", "regret"),
        takes=("sizes",),
    ),
    Part(
        "schedule-bottleneck", "balance against other packers", SCHEDULE, 5.0, ("--part", "bottleneck"),
        takes=("sizes",), needs=("rivals",),
    ),
    Part(
        "schedule-makespan", "simulated steps of large plans", SCHEDULE, 4.0, ("--part", "makespan", "--seeds", "2"),
        ("--part", "makespan", "--seeds", "1"), 0.7, ("sizes",),
    ),
    Part("schedule-idle", "idle time by policy, simulated", SCHEDULE, 4.0, ("--part", "idle"), takes=("sizes",)),
    Part(
        "schedule-real", "real steps under each policy", SCHEDULE, 7.0, ("--part", "real", "--seeds", "5"),
        ("--part", "real", "--seeds", "3"), 2.2, ("sizes",),
    ),
    Part(
        "schedule-trainer", "the sampler in Hugging Face's Trainer", SCHEDULE, 4.0, ("--part", "trainer"),
        takes=("sizes",),
    ),
    Part("schedule-overhead", "what scheduling costs the ranks", SCHEDULE, 4.0, ("--part", "overhead")),
    Part("correct", "corrections under known truths, simulated", CORRECT, 2.0, ("--part", "synthetic")),
    Part("correct-measured", "corrections and re-planning in real jobs", CORRECT, 45.0, ("--part", *MEASURED)),
    Part(
        "endtoend", "whole trainings, dflop beside data-blind ones", f"{BENCH}.endtoend", 60.0, ("--full",), (), 4.7,
        ("media",),
    ),
    Part(
        "peers", "dflop beside its peers on the same global batches, simulated", f"{BENCH}.peers", 30.0, ("--full",),
        takes=("sizes",), needs=("rivals",),
    ),
    Part("claims", "the paper's claims, one by one", f"{BENCH}.claims", 35.0, ("--full",)),
    Part(
        "growth", "how time and memory of every part grow", f"{BENCH}.growth", 30.0,
        ("--full", "--plot", "{stem}.svg"),
    ),
    Part("replay", "steps of many GPUs from stage times of one, simulated", f"{BENCH}.replay", 5.0, takes=("sizes",),
         needs=("times",)),
)  # fmt: skip


def chosen(names: list[str] | None, is_full: bool) -> list[Part]:
    """The parts that are named, else those of the subset or all.

    Raises:
        ValueError: no part is called so.
    """
    if names is None:
        return [part for part in PARTS if is_full or part.subset is not None]
    known = {part.name: part for part in PARTS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no part is called {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names]
