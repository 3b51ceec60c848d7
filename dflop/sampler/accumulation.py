"""Optimizer steps for loops that accumulate: the microbatches of one step, and what each one's loss weighs.

A trainer takes the mean loss of a microbatch, divides by the number of microbatches and averages over ranks. With equal
counts of tokens that is the mean over all tokens. With uneven ones it is not: a token in a small microbatch would count
more. The exact factor needs nothing but three counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from dflop.errors import ConfigError, TrainError
from dflop.sampler.rank_plans import BatchPlan

Reduction = Literal["mean", "sum"]


class Step:
    """One optimizer step of this rank; iterating over it gives its microbatches.

    Args:
        plan: Of the global batch.
        rank: This one.
        num_replicas: Data-parallel ranks.
        batches: The loader's, one per microbatch; None: the positions in the dataset themselves.
    """

    def __init__(self, plan: BatchPlan, rank: int, num_replicas: int, batches: Iterator[Any] | None) -> None:
        self.plan = plan
        self.indices = plan.rank(rank)
        """Positions in the dataset, per microbatch."""
        self.supervised = plan.rank_supervised(rank)
        """Tokens that carry loss, per microbatch; None where the costs do not say."""
        self._is_filler = plan.is_filler(rank)
        self._num_replicas = num_replicas
        self._batches = iter(self.indices) if batches is None else batches
        self._num_left = len(self.indices)

    @property
    def number(self) -> int:
        """Steps before this one, over all epochs."""
        return self.plan.step

    @property
    def num_microbatches(self) -> int:
        """Microbatches of this rank and of every other one."""
        return len(self.indices)

    @property
    def num_supervised_tokens(self) -> int | None:
        """Tokens that carry loss in the global batch, over all ranks; None where the costs do not say."""
        return None if self.plan.supervised is None else int(self.plan.supervised.sum())

    @property
    def is_drawn(self) -> bool:
        """Whether all of its microbatches were handed out."""
        return not self._num_left

    def __len__(self) -> int:
        return self.num_microbatches

    def __iter__(self) -> Iterator[Any]:
        while self._num_left:
            try:
                batch = next(self._batches)
            except StopIteration:
                raise TrainError(
                    f"the loader ended within step {self.number}: {self._num_left} of {self.num_microbatches} "
                    "microbatch(es) are missing",
                    where="BalancedBatchSampler.steps",
                    hint="give the DataLoader whose batch_sampler this sampler is",
                ) from None
            self._num_left -= 1
            yield batch

    def loss_scales(
        self,
        *,
        reduction: Reduction = "mean",
        averaged: bool = True,
        counts: Sequence[int | torch.Tensor] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> list[float]:
        """Per microbatch, what to multiply its loss with; see `loss_scale`.

        Where a microbatch may have no token that carries loss, a mean over it is NaN, and so is 0 times that: such data
        need a loss that sums.

        Args:
            reduction: Of the loss over a microbatch's tokens.
            averaged: Whether gradients are averaged over ranks.
            counts: Tokens that carry loss, per microbatch: needed where the costs do not say. They are summed over
                ranks, in one all-reduce that all of them must take part in.
            group: The data-parallel ranks, if they are not all there are.

        Raises:
            ConfigError: the number of tokens with loss is unknown.
        """
        if counts is not None:
            scored = [0 if filler else int(c) for c, filler in zip(counts, self._is_filler, strict=True)]
            total = sum_over_ranks(sum(scored), group)
        elif self.supervised is not None:
            scored, total = self.supervised, self.num_supervised_tokens or 0
        else:
            raise ConfigError(
                "the costs do not say how many tokens of a sample carry loss",
                where="Step.loss_scales",
                hint="sample_costs(..., supervised=...), or give `counts`, e.g. (labels[:, 1:] != -100).sum()",
            )
        return [loss_scale(n, total, self._num_replicas, reduction=reduction, averaged=averaged) for n in scored]

    def skip_rest(self) -> None:
        """Draw the microbatches nobody asked for, so that the loader stands at the next step."""
        for _ in self:
            pass


def loss_scale(
    num_tokens: float,
    num_global_tokens: float,
    num_replicas: int = 1,
    *,
    reduction: Reduction = "mean",
    averaged: bool = True,
) -> float:
    """What to multiply a microbatch's loss with, so that the step's gradient is the mean over all supervised tokens.

    Do not divide by the number of microbatches on top of it.

    Args:
        num_tokens: Tokens that carry loss in the microbatch.
        num_global_tokens: In the global batch, over all ranks.
        num_replicas: Data-parallel ranks.
        reduction: Whether the loss is the mean or the sum over the microbatch's tokens.
        averaged: Whether gradients are averaged over ranks, as DDP and FSDP do unless told otherwise; False: summed.
    """
    if not num_tokens:  # a mean over nothing may be NaN; so would be its product with 0, which the caller must skip
        return 0.0
    share = num_tokens / num_global_tokens if reduction == "mean" else 1 / num_global_tokens
    return share * (num_replicas if averaged else 1)


def sum_over_ranks(value: int, group: dist.ProcessGroup | None = None) -> int:
    """Sum of a count over data-parallel ranks; itself where there is no process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    total = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(total, group=group)
    return int(total)
