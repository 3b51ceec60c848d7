"""The parts of the benchmark as data: the command of each, what it needs, how long it takes.

With --full a part is measured whole. Without, it runs with fewer seeds or rows (`subset`), so that all parts together
take 20 minutes on two cores, or it is left out. Results of a subset have a name of their own and stand in no document.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NEEDS: Mapping[str, str] = {
    "sizes": "a table of real sample sizes: --sizes TABLE",
    "media": "a folder of real media: --media DIR",
    "slurm": "a Slurm that may be given 500 jobs: --slurm",
}
"""What a part may need or take, and how to give it."""


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
    """`{stem}` stands for the path of the JSON file without its suffix: for pictures."""
    subset: tuple[str, ...] | None = None
    """Arguments without --full; None: only with it."""
    subset_minutes: float = 0.0
    takes: tuple[str, ...] = ()
    """Options that are handed on where they are given."""
    needs: tuple[str, ...] = ()
    """Of `NEEDS`: without one of them the part is left out."""

    def args_of(self, is_full: bool) -> tuple[str, ...]:
        """Its arguments; a part that has no subset is always whole."""
        return self.args if is_full or self.subset is None else self.subset

    def minutes_of(self, is_full: bool) -> float:
        return self.minutes if is_full or self.subset is None else self.subset_minutes

    def result_name(self, is_full: bool) -> str:
        """Of its file, without the date."""
        return self.name if self.args_of(is_full) == self.args else f"{self.name}-subset"

    def command(self, given: Mapping[str, str], path: Path, is_full: bool) -> list[str]:
        """The words after `python` that write its figures to `path`."""
        options = [word for name in self.takes if name in given for word in (f"--{name}", given[name])]
        own = [arg.replace("{stem}", str(path.with_suffix(""))) for arg in self.args_of(is_full)]
        return ["-m", self.module, *own, *options, "--json", str(path)]

    def shown_command(self, given: Mapping[str, str], is_full: bool) -> str:
        """The same for documents: without anybody's paths."""
        words = {name: NEEDS[name].split()[-1] for name in given}
        return " ".join(["python", *self.command(words, Path(f"{self.name}.json"), is_full)])

    def missing(self, given: Mapping[str, str]) -> list[str]:
        """What it needs and does not have, and how to give it."""
        have = set(given) if shutil.which("sbatch") else {*given} - {"slurm"}
        return [NEEDS[need] for need in self.needs if need not in have]


SCHEDULE, CORRECT = "tests.bench.schedule", "tests.bench.correct"
SIZES = ("sizes",)
PARTS = (
    Part("store", "the store under load", "tests.bench.store", 4.0, (), ("--rows", "1000000"), 2.4),
    Part("data", "profiling datasets", "tests.bench.data", 4.0, (), ("--samples", "4000"), 2.0, ("sizes", "media")),
    Part("cost", "fitting and predicting costs", "tests.bench.cost", 0.1, (), (), 0.1),
    Part("profile", "how well a profile predicts what it did not see", "tests.bench.profile", 6.0),
    Part(
        "simulate", "real steps against the simulator", "tests.bench.simulate", 8.0, (),
        ("--budget", "30", "--batches", "2", "--rounds", "2", "--case", "0", "4", "6"), 1.7,
    ),
    Part("engine", "the engine against plain Hugging Face", "tests.bench.engine", 4.4, (), (), 4.4, SIZES),
    Part("plan", "what planning takes", "tests.bench.plan", 1.1, (), (), 1.1),
    Part(
        "regret", "how far the planner is from the best, simulated", "tests.bench.plan", 25.0, ("--part", "regret"),
        takes=SIZES,
    ),
    Part("launch", "submitting and watching jobs, on a fake Slurm", "tests.bench.launch", 0.6, (), (), 0.6),
    Part(
        "launch-slurm", "the same with 500 jobs on a real Slurm", "tests.bench.launch", 5.0, ("--real",),
        needs=("slurm",),
    ),
    Part(
        "suite", "the paper's models on data-sheet costs, simulated", "tests.bench.suite", 3.5,
        ("--picture", "{stem}.svg"),
    ),
    Part(
        "schedule-makespan", "simulated steps of large plans", SCHEDULE, 4.0, ("--part", "makespan", "--seeds", "2"),
        ("--part", "makespan", "--seeds", "1"), 0.7, SIZES,
    ),
    Part(
        "schedule-real", "real steps under each policy", SCHEDULE, 7.0, ("--part", "real", "--seeds", "5"),
        ("--part", "real", "--seeds", "3"), 2.2, SIZES,
    ),
    Part("correct", "corrections under known truths, simulated", CORRECT, 2.0, ("--part", "synthetic")),
    Part("correct-measured", "corrections in real jobs", CORRECT, 40.0, ("--part", "real", "--seeds", "2")),
    Part(
        "endtoend", "whole trainings, dflop against data-blind ones", "tests.bench.endtoend", 60.0, ("--full",), (),
        4.7, ("media",),
    ),
    Part(
        "peers", "dflop against its peers on the same global batches, simulated", "tests.bench.peers", 30.0,
        ("--full",), takes=SIZES,
    ),
)  # fmt: skip


def chosen(names: Sequence[str] | None, is_full: bool) -> list[Part]:
    """The parts that are named, else those of the subset or all.

    Raises:
        ValueError: no part has this name.
    """
    if names is None:
        return [part for part in PARTS if is_full or part.subset is not None]
    known = {part.name: part for part in PARTS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no part is called {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names]
