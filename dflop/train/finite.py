"""Steps whose loss or gradient norm is not finite: they update nothing, and three in a row end the job.

Loss and norm of the global batch come out of one all-reduce over all ranks (`GradientReducer.totals`). One NaN or
infinity anywhere makes that sum not finite everywhere, so every rank skips the same steps. A skipped step counts as a
step: its batch is consumed and the learning rate moves on. Weights, AdamW's moments and its count of updates stay as
they are. Periodic checkpoints wait for the next finite step, as the last update may have ruined the weights and must
not push out older checkpoints. One that a stop asks for, and the last, are written, and carry the steps skipped in a
row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dflop.errors import TrainError
from dflop.train.inputs import MicrobatchInput

MAX_SKIPPED = 3
"""Steps in a row."""
SKIPPED = "skipped_steps"
"""Key in what a checkpoint keeps."""
_MAX_NAMED = 64
"""Samples that a message lists."""


class SkippedSteps:
    """The steps skipped in a row until now, with the samples that may have caused it; equal on all ranks.

    Args:
        kept: What `state` returned, as a checkpoint kept it.
    """

    def __init__(self, kept: Mapping[str, Any]) -> None:
        self._steps = [(int(step), [int(index) for index in samples]) for step, samples in kept.get(SKIPPED, ())]

    def __bool__(self) -> bool:
        return bool(self._steps)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: JSON."""
        return {SKIPPED: self._steps} if self._steps else {}

    def add(self, step: int, samples: Sequence[int]) -> None:
        """Count a step that was skipped."""
        self._steps.append((step, list(samples)))

    def clear(self) -> None:
        """Begin anew after a step with finite loss and gradients."""
        self._steps.clear()

    def raise_if_too_many(self) -> None:
        """End the job after too many.

        Raises:
            TrainError: with the steps and their samples.
        """
        if len(self._steps) < MAX_SKIPPED:
            return
        numbers = ", ".join(str(step) for step, _ in self._steps)
        raise TrainError(
            f"loss or gradient norm was not finite in {MAX_SKIPPED} steps in a row ({numbers})",
            where="; ".join(f"step {step}, samples {listed(samples)}" for step, samples in self._steps),
            hint="if these are whole batches, the weights have diverged: start a new run with a lower "
            "train.learning_rate or more train.warmup_steps (dflop export and model.weights give it the weights of a "
            "checkpoint); if they are few samples, check their media and labels, and start again: the run resumes from "
            "its newest checkpoint",
        )


def suspects(
    losses: Mapping[int, float], microbatches: Sequence[MicrobatchInput | None], healthy: torch.Tensor,
    group: dist.ProcessGroup,
) -> list[int]:  # fmt: skip
    """Positions in the global batch of what may have made a step not finite; collective, equal on all ranks.

    These are the samples of microbatches whose loss is not finite; all that carry loss where every loss is finite and
    only a gradient is not.

    Args:
        losses: Of the microbatches of this rank that have one.
        microbatches: Of this rank.
        healthy: bool `[global batch]`; samples that carry loss.
        group: All ranks.
    """
    found = torch.zeros(len(healthy), dtype=torch.int32)
    for k, loss in losses.items():
        given = microbatches[k]
        if not math.isfinite(loss) and given is not None and given.llm is not None:
            found[given.llm.loss_sample] = 1
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    found *= healthy
    positions: list[int] = (found if found.any() else healthy).nonzero().flatten().tolist()
    return positions


def listed(samples: Sequence[int]) -> str:
    """Numbers of samples, at most a line or two of them."""
    more = f" and {len(samples) - _MAX_NAMED} more" if len(samples) > _MAX_NAMED else ""
    return ", ".join(map(str, samples[:_MAX_NAMED])) + more
