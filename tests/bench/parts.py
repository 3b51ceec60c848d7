"""The parts of the benchmark as data: the command of each, what it takes, how long it takes.

With --full a part is measured whole. Without, it runs with fewer seeds or rows (`subset`), so that all parts together
take 20 minutes on two cores, or it is left out. Results of a subset have a name of their own and stand in no document.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GIVEN: Mapping[str, str] = {"sizes": "a TABLE of real sample sizes", "media": "a DIR of real media"}
"""What may be given to parts; documents show the word in capitals."""


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
    """Of `GIVEN`."""
    by_name: bool = False
    """It needs what not every machine has, Slurm or a table of sizes: only where its name is given."""

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
        words = {name: GIVEN[name].split()[1] for name in given}
        return " ".join(["python", *self.command(words, Path(f"{self.name}.json"), is_full)])


SIZES = ("sizes",)
PARTS = (
    Part("store", "the store under load", "tests.bench.store", 4.0, (), ("--rows", "1000000"), 2.4),
    Part("data", "profiling datasets", "tests.bench.data", 4.0, (), ("--samples", "4000"), 2.0, ("sizes", "media")),
    Part("engine", "the engine against plain Hugging Face", "tests.bench.engine", 4.4, (), (), 4.4, SIZES),
    Part("plan", "what planning takes", "tests.bench.plan", 1.1, (), (), 1.1),
    Part(
        "regret", "how far the planner is from the best, simulated", "tests.bench.plan", 25.0, ("--part", "regret"),
        takes=SIZES,
    ),
    Part(
        "launch-slurm", "submitting and watching 500 jobs on a real Slurm", "tests.bench.launch", 5.0, by_name=True
    ),
    Part(
        "suite", "the paper's models on data-sheet costs, simulated", "tests.bench.suite", 3.5,
        ("--picture", "{stem}.svg"),
    ),
    Part(
        "settings", "clusters of 8 to 1,024 GPUs, simulated", "tests.bench.suite", 30.0, ("--suite", "settings")
    ),
    Part(
        "hosts", "the largest models with host memory, simulated", "tests.bench.suite", 6.0, ("--suite", "hosts")
    ),
    Part("messages", "NCCL's rules on what our plans send", "tests.bench.messages", 6.0),
    Part(
        "experts", "two models with experts, simulated", "tests.bench.suite", 16.0, ("--suite", "experts")
    ),
    Part(
        "real", "two models on real sample sizes, simulated", "tests.bench.suite", 2.0, ("--suite", "real"),
        takes=SIZES, by_name=True,
    ),
    Part(
        "schedule-real", "real steps under each policy, and against the simulator", "tests.bench.schedule", 7.0,
        ("--seeds", "5"), ("--seeds", "3"), 2.2, SIZES,
    ),
    Part(
        "trainer", "BalancedTrainer against the orders of Hugging Face's Trainer", "tests.bench.trainer", 4.0,
        ("--rounds", "8"), ("--rounds", "2"), 1.2,
    ),
    Part(
        "verdicts", "what dflop sampler estimate says, beside real steps", "tests.bench.verdicts", 2.0,
        ("--rounds", "2"), ("--rounds", "1"), 1.0,
    ),
    Part(
        "dealt", "encoder items dealt over ranks beside no dealing", "tests.bench.dealt", 3.0, (),
        ("--rounds", "1"), 1.5, SIZES,
    ),
    Part(
        "packed", "packed samples with images beside padded ones under Hugging Face's Trainer", "tests.bench.packing",
        4.0, (), ("--rounds", "1"), 2.0, SIZES,
    ),
    Part("balance", "how evenly batches are dealt out, beside Karmarkar-Karp", "tests.bench.balance", 0.3),
    Part(
        "context", "ranks that share samples beside ranks that pack them", "tests.bench.context", 2.5, (),
        ("--rounds", "1"), 1.5, SIZES,
    ),
    Part("models", "every model type of transformers, traced and compared", "tests.bench.models", 8.0),
    Part("tokens", "media of every processor of transformers, counted from sizes", "tests.bench.model_tokens", 4.0),
    Part("correct", "corrections under known truths, simulated", "tests.bench.correct", 2.0),
    Part(
        "endtoend", "whole trainings, dflop against baselines", "tests.bench.endtoend", 60.0, ("--full",), (),
        4.7, ("media",),
    ),
)  # fmt: skip


def chosen(names: Sequence[str] | None, is_full: bool) -> list[Part]:
    """The parts that are named, else those of the subset or all."""
    if names:
        return [part for part in PARTS if part.name in names]
    return [part for part in PARTS if not part.by_name and (is_full or part.subset is not None)]
