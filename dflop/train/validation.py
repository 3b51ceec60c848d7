"""The loss of samples that are held out of training: forward passes over them between two steps.

They are planned and packed like steps, once per job, and run through the same engine in the plan's layout. What comes
of it is the summed loss of every sample, over all ranks: means over tokens, of all or of one source, follow exactly,
however the samples were packed. While one batch runs the feed thread prepares the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from dflop.records import StepPlan
from dflop.train.engine import Engine
from dflop.train.inputs import PreparedStep

Held = tuple[PreparedStep, torch.Tensor]
"""A batch that can run, and which of its samples are healthy."""


@dataclass(frozen=True, slots=True)
class Validation:
    """What is held out of training.

    Args:
        step_plans: Of all samples that are held out, the same on every rank.
        every_steps: Steps between two validations.
    """

    step_plans: Sequence[StepPlan]
    every_steps: int

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether the samples are looked at after a step."""
        return is_last or (step + 1) % self.every_steps == 0

    def losses(
        self, begin: Callable[[StepPlan], Future[Held]], first: Future[Held], engine: Engine, group: dist.ProcessGroup
    ) -> dict[int, float]:
        """Summed loss of every healthy sample by its index, the same on every rank; collective.

        Args:
            begin: Prepares a batch in the feed thread.
            first: What it returned for the first one.
            engine: Of the rank.
            group: All ranks, on the host.
        """
        found, pending = dict[int, float](), first
        for number, step_plan in enumerate(self.step_plans, 1):
            prepared, healthy = pending.result()
            if number < len(self.step_plans):
                pending = begin(self.step_plans[number])
            trace = engine.run(prepared.microbatches, num_loss_tokens=1, is_training=False)
            sums = over_ranks(trace.sample_losses, len(healthy), group)
            kept = zip(step_plan.sample_index, sums.tolist(), healthy.tolist(), strict=True)
            found |= {index: loss for index, loss, is_healthy in kept if is_healthy}
        return found


def over_ranks(of_rank: np.ndarray, num_samples: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Sums over ranks of what `StepTrace.sample_losses` has, one per position in the global batch; collective."""
    sums = torch.zeros(num_samples, dtype=torch.float64)
    sums[: len(of_rank)] = torch.from_numpy(of_rank)
    dist.all_reduce(sums, group=group)
    return sums
