"""A check that balanced microbatches give the gradient of the whole global batch, with a user's own model and loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dflop.errors import ConfigError, TrainError
from dflop.sampler.accumulation import Reduction, loss_scale
from dflop.sampler.batch_sampler import BalancedBatchSampler
from dflop.sampler.costs_of_samples import Ints

Gradient = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class LossCheck:
    """How far gradients of a step are from those of its samples one at a time, relative to their norm."""

    error_frac: float
    """Error of the sampler's microbatches, scaled."""
    naive_error_frac: float
    """Error of the same microbatches as most loops would add them up: the mean of their means."""
    worst_parameter: str
    """The one that is furthest off, relative to its own norm."""


def check_loss_scaling(
    sampler: BalancedBatchSampler,
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    fetch: Callable[[Sequence[int]], Any],
    *,
    reduction: Reduction = "mean",
    count: Callable[[Any], int] | None = None,
    step: int = 0,
    tolerance: float = 1e-4,
) -> LossCheck:
    """Compare the gradient of one global batch with that of its samples, one at a time; all ranks in this process.

    The model runs in eval mode, dropout would differ, and gets its mode back; its `.grad` is left alone.

    Args:
        sampler: Of any rank.
        model: As it trains, not yet wrapped; float32 where the tolerance is to mean something.
        loss: Of a batch, reduced over its tokens.
        fetch: Dataset and collator: `lambda indices: collate([dataset[i] for i in indices])`.
        reduction: Of `loss`.
        count: Tokens of a batch that carry loss; None: as the costs say.
        step: Which global batch.
        tolerance: Relative error of the gradient that is still rounding.

    Raises:
        TrainError: the gradients differ by more than the tolerance.
        ConfigError: neither costs nor `count` say how many tokens carry loss.
    """
    plan, num_replicas = sampler.planned(step), sampler.num_replicas
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def tokens(batch: Any, positions: Ints) -> int:
        if count is not None:
            return int(count(batch))
        if plan.supervised is None:
            raise ConfigError(
                "the costs do not say how many tokens of a sample carry loss",
                where="check_loss_scaling",
                hint="give `count`, e.g. lambda batch: (batch['labels'][:, 1:] != -100).sum()",
            )
        return int(plan.supervised[positions].sum())

    def gradient(parts: Sequence[Ints], weigh: Callable[[int], float]) -> Gradient:
        """Sum over parts of the global batch, each weighed by its tokens that carry loss."""
        found = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for positions in parts:
            batch = fetch(plan.samples[positions].tolist())
            if weight := weigh(tokens(batch, positions)):
                of_part = torch.autograd.grad(loss(model, batch) * weight, [*parameters.values()], allow_unused=True)
                for total, added in zip(found.values(), of_part, strict=True):
                    if added is not None:
                        total += added
        return found

    singles = list(np.arange(len(plan.samples))[:, None])
    microbatches = [p for rank in range(num_replicas) for p in plan.dealt.of_rank(rank) if len(p)]
    num_microbatches = num_replicas * plan.dealt.num_microbatches
    was_training = model.training
    model.eval()
    try:
        total = sum(tokens(fetch(plan.samples[one].tolist()), one) for one in singles)
        scale = functools.partial(loss_scale, num_global_tokens=total, reduction=reduction)
        alone = gradient(singles, scale)
        scaled = gradient(microbatches, lambda n: scale(n, num_replicas=num_replicas) / num_replicas)
        naive = gradient(
            microbatches, lambda n: (1.0 if reduction == "mean" else 1 / max(1, n)) * (n > 0) / num_microbatches
        )
    finally:
        model.train(was_training)
    errors = {name: _relative({name: scaled[name]}, alone) for name in parameters}
    worst = max(errors, key=errors.__getitem__)
    found = LossCheck(_relative(scaled, alone), _relative(naive, alone), worst)
    if not found.error_frac <= tolerance:
        raise TrainError(
            f"gradients of step {step} differ by {found.error_frac:.2e} from those of its samples one at a time "
            f"(tolerance {tolerance:g}; unscaled they would differ by {found.naive_error_frac:.2e}), "
            f"most in `{worst}`: {errors[worst]:.2e}",
            where="check_loss_scaling",
            hint="is `reduction` what the loss does? do `supervised` counts leave out what the loss never predicts "
            "(the first token of a sequence)? does padding reach attention, positions or the loss?",
        )
    return found


def _relative(some: Gradient, exact: Gradient) -> float:
    """Error of the gradient of some parameters, relative to its norm."""
    one, other = (torch.cat([of[name].flatten() for name in some]) for of in (some, exact))
    return float((one - other).norm() / (other.norm() or 1))
