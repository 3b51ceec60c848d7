"""The head split by rows of the vocabulary: which rank has which, and how ranks use `models/loss.py` together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from dflop.models.loss import HeadLoss, head_loss
from dflop.parallel.exchange import all_reduce, sum_backward
from dflop.parallel.part import Part

Replaced = dict[nn.Parameter, tuple[nn.Parameter, Part]]
"""Whole parameter -> what this rank holds of it."""


def vocab_share(vocab_size: int, rank: int, degree: int) -> tuple[int, int]:
    """Rows `[first, end)` of the vocabulary that belong to `rank`: evenly, the first ranks take one more if need be."""
    each, more = divmod(vocab_size, degree)
    first = rank * each + min(rank, more)
    return first, first + each + (rank < more)


def keep_part(linear: nn.Module, kind: str, part: Part) -> Replaced:
    """Replace the weight or bias of a Linear by a part of it."""
    whole = getattr(linear, kind)
    kept = nn.Parameter(part.of(whole.detach()), requires_grad=whole.requires_grad)
    setattr(linear, kind, kept)
    return {whole: (kept, part)}


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
        if (whole := getattr(head, kind)) is not None:
            replaced |= keep_part(head, kind, Part(tuple(whole.shape), 0, ((first, end),)))
    if not tied:
        head.out_features = end - first

    def reduce(values: torch.Tensor, *, maximum: bool = False) -> torch.Tensor:
        return all_reduce(values, group, maximum=maximum)

    def loss(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        rows = sum_backward(weight, group)[first:end] if tied else weight
        return head_loss(sum_backward(hidden, group), rows, bias, targets, num_tokens, first=first, reduce=reduce)

    return loss, replaced
