"""Stage times under known factors."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop.correct.times import StepTimes
from dflop.cost.model import Floats
from dflop.simulate.step import Node

EDGES = {"vision": (10, 20, 30), "llm": (10, 20, 30, 40, 50)}
SHARED = (("vision", "llm"),)
RIGHT = {module: np.ones(len(edges) + 1) for module, edges in EDGES.items()}


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one microbatch on one stage of one data-parallel rank."""

    node: Node
    measured_s: float
    expected_s: Mapping[str, Floats]
    """Uncorrected prediction per module that has work in it, `[buckets]`."""


def as_arrays(times: Iterable[StageTime]) -> StepTimes:
    """What estimators take."""
    found = list(times)
    nodes = tuple(dict.fromkeys(time.node for time in found))
    widths = {module: len(seconds) for time in found for module, seconds in time.expected_s.items()}
    return StepTimes(
        nodes,
        np.array([nodes.index(time.node) for time in found], dtype=np.int64),
        np.array([time.measured_s for time in found], dtype=np.float64),
        {
            module: np.array([time.expected_s.get(module, np.zeros(width)) for time in found])
            for module, width in widths.items()
        },
    )


def step_times(
    rng: np.random.Generator, truth: Mapping[str, Floats], *, num: int = 16, noise_frac: float = 0.0,
    slowness: Sequence[float] = (1.0,), stages: Sequence[Sequence[str]] | None = None,
) -> Iterator[StageTime]:  # fmt: skip
    """One step: `num` microbatches on every data-parallel rank of every stage.

    Args:
        rng: Of mixes and noise.
        truth: Per module, a factor per bucket.
        num: Microbatches.
        noise_frac: Standard deviation of a time.
        slowness: Per data-parallel rank.
        stages: Modules on each; None: every module alone on one.
    """
    for stage, modules in enumerate(stages or [[module] for module in truth]):
        for rank, slow in enumerate(slowness):
            for _ in range(num):
                expected_s = {m: 0.1 * rng.dirichlet(np.full(len(truth[m]), 0.5)) for m in modules}
                seconds = sum(float(truth[m] @ expected_s[m]) for m in modules)
                node: Node = (modules[-1], stage, rank)
                yield StageTime(node, seconds * slow * max(rng.normal(1.0, noise_frac), 0.1), expected_s)
