"""Sequence parallelism (Korthikanti et al., arXiv 2205.05198, section 4.2.2): tensor-parallel ranks share the tokens.

Between attention and MLP, and in the residual stream, each rank of a tensor-parallel group holds every token's hidden
state in ordinary tensor parallelism. Here it holds those of its share of the tokens, the next rank those of the next
share, padded to shares of one size. What enters an attention or MLP is gathered, what leaves it is summed and shared
out: together that moves the bytes of the all-reduce that it replaces. The gathered tensor is let go of and gathered
again for the backward pass, which is one all-gather more for each of the two. Norms see a rank's own tokens, so that
their gradients are sums over the ranks, formed once per step (`Stage.partial`).
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dflop.models.autograd import applied
from dflop.parallel.exchange import exchanged

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def share_tokens(module: Any, group: dist.ProcessGroup) -> None:
    """Let a module of column- and row-split Linears be given a rank's share of the tokens; it is run with all of them.

    Args:
        module: An attention, which is given positions of all tokens and hence no padding, or an MLP. Frozen or not by
            now: Linears that do not train need what they are given once.
        group: Ranks that hold the other shares.
    """
    run = module.forward

    def forward(_: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        whole = exchanged(hidden_states, lambda share: _gathered(share, group), lambda grad: _summed(grad, group))
        positions = kwargs.get("position_embeddings")
        given = whole if positions is None else whole[..., : positions[0].shape[-2], :]
        out = run(given, *args, **kwargs)
        if not (whole.requires_grad and any(p.requires_grad for p in module.parameters())):
            return out
        first, *others = out if isinstance(out, tuple) else (out,)
        first = applied(_GatherAgain, first, hidden_states, whole, group)
        whole.untyped_storage().resize_(0)
        return (first, *others) if isinstance(out, tuple) else first

    module.forward = types.MethodType(forward, module)


def sum_and_share(partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`[..., tokens, width]`, a summand on each rank, to this rank's share of the tokens of the sum."""
    num_tokens = partial.shape[-2]
    return exchanged(
        partial, lambda part: _summed(part, group), lambda grad: _gathered(grad, group)[..., :num_tokens, :]
    )


def enter(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`[tokens, width]`, the same on every rank, to this rank's share of it."""
    num_tokens = len(whole)
    return exchanged(whole, lambda all_: _own(all_, group), lambda grad: _gathered(grad, group)[:num_tokens])


def leave(share: torch.Tensor, num_tokens: int, group: dist.ProcessGroup) -> torch.Tensor:
    """A rank's share to `[tokens, width]`; the gradient is whole on every rank."""
    return exchanged(share, lambda own: _gathered(own, group)[:num_tokens], lambda grad: _own(grad, group))


def num_shared(num_tokens: int, num_ranks: int) -> int:
    """Tokens of one share."""
    return -(-num_tokens // num_ranks)


def _padded(whole: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """`[..., tokens, width]` with zeros behind it, as many tokens as all shares have."""
    missing = num_ranks * num_shared(whole.shape[-2], num_ranks) - whole.shape[-2]
    return F.pad(whole, (0, 0, 0, missing)) if missing else whole


def _own(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    share: torch.Tensor = _padded(whole, group.size()).chunk(group.size(), dim=-2)[group.rank()]
    return share.clone()  # lets go of the others


def _gathered(share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`[..., share, width]`, a batch of one, to all shares one behind the other."""
    *batch, size, width = share.shape
    return _fill(share.new_empty((*batch, group.size() * size, width)), share, group)


def _fill(whole: torch.Tensor, share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if whole.numel():
        _all_gather(whole.view(-1, whole.shape[-1]), share.reshape(-1, whole.shape[-1]), group=group)
    return whole


def _summed(partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    *batch, num_tokens, width = partial.shape
    share = partial.new_empty((*batch, num_shared(num_tokens, group.size()), width))
    if share.numel():
        _reduce_scatter(share.view(-1, width), _padded(partial, group.size()).reshape(-1, width), group=group)
    return share


class _GatherAgain(torch.autograd.Function):
    """The identity; its backward pass, which comes before that of what made `out`, fills `whole` again."""

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, share: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.group = group
        ctx.save_for_backward(share, whole)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        share, whole = ctx.saved_tensors
        storage = whole.untyped_storage()
        if not storage.nbytes():  # a layer that has just run again still holds it
            storage.resize_(whole.numel() * whole.element_size())
            # By `data`, for to those who saved it these are the values that it has had all along.
            _fill(whole.data, share, ctx.group)
        return grad, None, None, None
