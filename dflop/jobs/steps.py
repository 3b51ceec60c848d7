"""Which global batch each step trains on, and under which policy.

Training takes the batches in order. The comparison trains the first few batches under both policies, alternating
which comes first, so that slow drifts of the machine fall on both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop.config import Config
from dflop.data.order import SampleOrder
from dflop.records import SampleShape

TRAIN, COMPARE = "train", "compare"
QUICK = "quick"
"""Policy of a plan for which there was no time: certified balance, no search."""
WARMUP = "warmup"
"""Policy name in the records of steps that do not count."""
NUM_WARMUP_STEPS = 2
"""First steps of a comparison, not counted: lazy initialisation and page faults."""


@dataclass(frozen=True, slots=True)
class StepSpec:
    """One step of a job."""

    batch_step: int
    """Step of the data order whose global batch is used."""
    policy: str
    label: str
    """Policy name in the records; empty keeps the scheduler's."""


def job_steps(config: Config, mode: str) -> tuple[StepSpec, ...]:
    """Steps of the `train` or the `compare` job."""
    if mode == TRAIN:
        return tuple(StepSpec(t, "balanced", "") for t in range(config.train.num_steps))
    steps = [StepSpec(t, "balanced", WARMUP) for t in range(NUM_WARMUP_STEPS)]
    for pair in range(config.compare.num_batches * config.compare.num_repeats):
        policies = ("arrival", "balanced") if pair % 2 == 0 else ("balanced", "arrival")
        steps += [StepSpec(pair % config.compare.num_batches, p, p) for p in policies]
    return tuple(steps)


class GlobalBatches:
    """Samples of the global batches of a run."""

    def __init__(self, config: Config, shapes: Sequence[SampleShape]) -> None:
        self._shapes = shapes
        weights = np.array([s.weight for s in shapes])
        size, window = config.plan.global_batch_size, config.dataset.shuffle_window
        self._order = SampleOrder(config.train.seed, len(shapes), size, weights, window=window)

    def at(self, batch_step: int) -> list[SampleShape]:
        """Samples of one global batch in arrival order."""
        return [self._shapes[i] for i in self._order.batch(batch_step)]
