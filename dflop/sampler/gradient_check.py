"""A check that balanced microbatches give the gradient of the whole global batch, with a user's own model and loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflop.errors import ConfigError, TrainError
from dflop.sampler.batch_sampler import BalancedBatchSampler
from dflop.sampler.loss import Reduction, loss_scale
from dflop.sampler.rank_plans import BatchPlan


@dataclass(frozen=True, slots=True)
class LossCheck:
    """How far gradients of a step are from those of its samples one at a time, relative to their norm."""

    error_frac: float
    """Of the sampler's microbatches, scaled."""
    naive_error_frac: float
    """Of the same microbatches as most loops would add them up: the mean of their means."""
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
    plan = sampler.planned(step)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    was_training = model.training
    model.eval()
    try:
        alone, scaled, naive = _gradients(plan, sampler.num_replicas, model, parameters, loss, fetch, reduction, count)
    finally:
        model.train(was_training)
    errors = {name: _relative(scaled[name], alone[name]) for name in parameters}
    found = LossCheck(
        error_frac=_relative(_flat(scaled), _flat(alone)),
        naive_error_frac=_relative(_flat(naive), _flat(alone)),
        worst_parameter=max(errors, key=errors.__getitem__),
    )
    if not found.error_frac <= tolerance:
        raise TrainError(
            f"gradients of step {step} differ by {found.error_frac:.2e} from those of its samples one at a time "
            f"(tolerance {tolerance:g}; unscaled they would differ by {found.naive_error_frac:.2e}), "
            f"most in `{found.worst_parameter}`: {errors[found.worst_parameter]:.2e}",
            where="check_loss_scaling",
            hint="is `reduction` what the loss does? do `supervised` counts leave out what the loss never predicts "
            "(the first token of a sequence)? does padding reach attention, positions or the loss?",
        )
    return found


def _gradients(
    plan: BatchPlan,
    num_replicas: int,
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    loss: Callable[[nn.Module, Any], Tensor],
    fetch: Callable[[Sequence[int]], Any],
    reduction: Reduction,
    count: Callable[[Any], int] | None,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Of the samples one at a time, of the microbatches scaled, and of the microbatches as means of means."""

    def tokens(batch: Any, positions: list[int]) -> int:
        if count is not None:
            return int(count(batch))
        if plan.supervised is None:
            raise ConfigError(
                "the costs do not say how many tokens of a sample carry loss",
                where="check_loss_scaling",
                hint="give `count`, e.g. lambda batch: (batch['labels'][:, 1:] != -100).sum()",
            )
        return int(plan.supervised[positions].sum())

    total = sum(tokens(fetch([int(i)]), [at]) for at, i in enumerate(plan.samples))
    alone, scaled, naive = ({name: torch.zeros_like(p) for name, p in parameters.items()} for _ in range(3))
    for at, i in enumerate(plan.samples):
        batch = fetch([int(i)])
        weight = loss_scale(tokens(batch, [at]), total, reduction=reduction)
        if weight:
            _add(alone, loss(model, batch), parameters, weight)
    num_slots = plan.dealt.num_microbatches
    for rank in range(num_replicas):
        for slot in range(num_slots):
            positions = ((plan.dealt.rank == rank) & (plan.dealt.slot == slot)).nonzero()[0].tolist()
            if not positions:
                continue
            batch = fetch(plan.samples[positions].tolist())
            num_tokens = tokens(batch, positions)
            weight = loss_scale(num_tokens, total, num_replicas, reduction=reduction) / num_replicas
            mean = 1 if reduction == "mean" else 1 / max(1, num_tokens)
            if weight:
                _add(scaled, loss(model, batch), parameters, weight)
                _add(naive, loss(model, batch), parameters, mean / (num_slots * num_replicas))
    return alone, scaled, naive


def _add(gradients: dict[str, Tensor], loss: Tensor, parameters: dict[str, nn.Parameter], weight: float) -> None:
    found = torch.autograd.grad(loss * weight, list(parameters.values()), allow_unused=True)
    for name, gradient in zip(parameters, found, strict=True):
        if gradient is not None:
            gradients[name] += gradient


def _relative(one: Tensor, other: Tensor) -> float:
    norm = float(other.norm())
    return float((one - other).norm()) / norm if norm else float(one.norm())


def _flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in gradients.values()])
