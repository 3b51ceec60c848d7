"""The head split by rows of the vocabulary, and the cross entropy of it (arXiv 1909.08053, section 3).

The logits `[tokens, vocabulary]` are the largest tensor of a training step, and no rank ever holds them whole: the
ranks agree on each token's greatest logit, then on the sum of its exponentials and its target's logit, three numbers
per token. How ranks exchange numbers is an argument of the loss, so that its arithmetic can be checked without
processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dflop.parallel.exchange import all_reduce, sum_backward
from dflop.parallel.part import Part

Replaced = dict[nn.Parameter, tuple[nn.Parameter, Part]]
"""Whole parameter -> what this rank holds of it."""
HeadLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Hidden states `[tokens, hidden]` and targets `[tokens]` -> sum of cross entropies."""


class Reduce(Protocol):
    """Combine float32 `values` of one shape over all ranks, by their sum or their maximum; collective."""

    def __call__(self, values: torch.Tensor, *, maximum: bool = False) -> torch.Tensor: ...


def vocab_share(vocab_size: int, rank: int, degree: int) -> tuple[int, int]:
    """Rows `[first, end)` of the vocabulary that belong to `rank`: evenly, the first ranks take one more if need be."""
    each, more = divmod(vocab_size, degree)
    first = rank * each + min(rank, more)
    return first, first + each + (rank < more)


def shard_head(head: nn.Linear, *, tied: bool, group: dist.ProcessGroup) -> tuple[HeadLoss, Replaced]:
    """Keep this rank's rows of the head.

    Args:
        head: Changed in place. A tied one stays whole: its weight is the embedding's.
        tied: Compute with this rank's rows of the whole weight, and sum the weight's gradient over the ranks in each
            backward pass, where every rank fills its own rows.
        group: Ranks that hold the other rows; at most as many as the vocabulary has entries.

    Returns:
        The loss to use from now on, the same number on every rank, and what took the place of what.
    """
    first, end = vocab_share(head.out_features, group.rank(), group.size())
    replaced: Replaced = {}
    for kind in ("bias",) if tied else ("weight", "bias"):
        whole = getattr(head, kind)
        if whole is not None:
            part = Part(tuple(whole.shape), 0, ((first, end),))
            kept = nn.Parameter(part.of(whole.detach()), requires_grad=whole.requires_grad)
            setattr(head, kind, kept)
            replaced[whole] = (kept, part)
    if not tied:
        head.out_features = end - first

    def reduce(values: torch.Tensor, *, maximum: bool = False) -> torch.Tensor:
        return all_reduce(values, group, maximum=maximum)

    def loss(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        weight = sum_backward(head.weight, group)[first:end] if tied else head.weight
        logits = F.linear(sum_backward(hidden, group), weight, head.bias)
        return vocab_cross_entropy(logits, targets, first, reduce)

    return loss, replaced


def vocab_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, first: int, reduce: Reduce) -> torch.Tensor:
    """Sum of cross entropies over all tokens, the same number on every rank; the backward pass exchanges nothing.

    The arithmetic is float32 whatever the type of the logits, whose gradient comes in their own type.

    Args:
        logits: `[tokens, share]`, this rank's part of the vocabulary; at least one column.
        targets: int64 `[tokens]`, ids of the whole vocabulary, the same on every rank.
        first: Id of the first column.
        reduce: How ranks exchange numbers: called twice, for `[tokens]` and for `[2, tokens]`.

    Returns:
        float32 scalar.
    """
    result: torch.Tensor = _VocabCrossEntropy.apply(logits, targets, first, reduce)  # type: ignore[no-untyped-call]  # torch gives `apply` no types
    return result


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, first: int, reduce: Reduce) -> torch.Tensor:
        highest = reduce(logits.amax(dim=-1).float(), maximum=True)
        column = targets - first
        mine = (column >= 0) & (column < logits.shape[-1])
        column = column.where(mine, 0)
        # Half-precision logits are promoted here, so that only one float32 tensor of their size exists at a time.
        shifted = torch.sub(logits, highest[:, None])
        target = shifted.gather(1, column[:, None]).squeeze(1).where(mine, 0.0)
        total, target = reduce(torch.stack([shifted.exp_().sum(dim=-1), target])).unbind()
        log_total = total.log()
        ctx.save_for_backward(logits, highest + log_total, column, mine)
        return (log_total - target).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, log_sum_exp, column, mine = ctx.saved_tensors
        # Softmax, less one at the target: made again from the logits, which in half precision take half the room.
        error = torch.sub(logits, log_sum_exp[:, None]).exp_()
        error.scatter_add_(1, column[:, None], -mine[:, None].to(error.dtype))
        return error.mul_(grad).to(logits.dtype), None, None, None
