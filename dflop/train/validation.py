"""The loss of samples that are held out of training: forward passes over them between two steps.

They are planned and packed like steps, once per job, and run through the same engine in the plan's layout. What comes
of it is the summed loss of every sample, over all ranks: means over tokens, of all or of one source, follow exactly,
however the samples were packed. While one batch runs the feed thread prepares the next.

All ranks have the same loss, so all know alike whether it is the lowest and when training has stopped to get better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dflop.records import StepPlan
from dflop.train.engine import Engine
from dflop.train.inputs import PreparedStep
from dflop.train.manifest import BEST, VALIDATED, name_of
from dflop.train.step_trace import Floats

Held = tuple[PreparedStep, torch.Tensor]
"""A batch that can run, and which of its samples are healthy."""


@dataclass(slots=True)
class Validation:
    """What is held out of training, and the lowest loss so far.

    Args:
        step_plans: Of all samples that are held out, the same on every rank.
        every_steps: Steps between two validations.
        keeps_best: Whether the checkpoint with the lowest loss stays.
        patience: Validations in a row without a lower loss that end training; 0: none do.
    """

    step_plans: Sequence[StepPlan]
    every_steps: int
    keeps_best: bool = False
    patience: int = 0
    best_loss: float = math.inf
    best_step: int = -1
    num_worse: int = 0
    """Validations since then."""

    def over(self, num_left: int) -> str:
        """Why training ends although there are steps left; empty: it does not."""
        if not 0 < self.patience <= self.num_worse or not num_left:
            return ""
        since = f"no lower validation loss in {self.num_worse} validations since step {self.best_step}"
        return f"{since} ({self.best_loss:.4f}); {num_left} steps are skipped"

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether the samples are looked at after a step."""
        return is_last or (step + 1) % self.every_steps == 0

    def judge(self, step: int, loss: float) -> bool:
        """Whether the loss after a step is the lowest so far; NaN is not."""
        is_best = loss < self.best_loss
        if is_best:
            self.best_loss, self.best_step = loss, step
        self.num_worse = 0 if is_best else self.num_worse + 1
        return is_best

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: JSON."""
        if self.best_step < 0:
            return {}
        stays = {BEST: name_of(self.best_step + 1)} if self.keeps_best else {}
        return {VALIDATED: [self.best_loss, self.best_step, self.num_worse], **stays}

    def restore(self, kept: Mapping[str, Any], *, is_new_stage: bool) -> None:
        """Go on from what `state` returned; a new stage of training has all patience again."""
        self.best_loss, self.best_step, self.num_worse = kept.get(VALIDATED, (math.inf, -1, 0))
        self.num_worse = 0 if is_new_stage else self.num_worse

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
            sums = torch.from_numpy(padded(trace.sample_losses, len(healthy)))
            dist.all_reduce(sums, group=group)
            found |= by_index(step_plan, sums.tolist(), healthy)
        return found


def padded(sample_losses: Floats, num_samples: int) -> Floats:
    """What `StepTrace.sample_losses` has, one per position in the global batch."""
    return np.pad(sample_losses, (0, num_samples - len(sample_losses)))


def by_index(step_plan: StepPlan, losses: Sequence[float], healthy: torch.Tensor) -> dict[int, float]:
    """Losses by position in the global batch as losses of healthy samples by their index."""
    kept = zip(step_plan.sample_index, losses, healthy.tolist(), strict=True)
    return {index: loss for index, loss, is_healthy in kept if is_healthy}
