"""Sequence parallelism (Korthikanti et al., arXiv 2205.05198, section 4.2.2): tensor-parallel ranks share the tokens.

Between attention and MLP, and in the residual stream, each rank of a tensor-parallel group holds every token's hidden
state in ordinary tensor parallelism. Here it holds those of its share of the tokens, the next rank those of the next
share, padded to shares of one size. What enters an attention or MLP is gathered, what leaves it is summed and shared
out: together that moves the bytes of the all-reduce that it replaces. The gathered tensor is let go of and gathered
again for the backward pass, which is one all-gather more for each of the two. Norms see a rank's own tokens, so that
their gradients are sums over the ranks, formed once per step (`Stage.partial`).

An LLM's stages hand shares to one another. An encoder's layers are given shares by hooks of the first layer, and give
back whole hidden states behind the last, and where a projector takes those of an inner layer.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dflop.errors import ConfigError
from dflop.models.autograd import WHOLE, applied, opaque
from dflop.parallel.exchange import exchanged

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_SHARED = "dflop_shared_tokens"
"""Attribute of a module: the ranks that share its tokens, and their `Whole`."""
Whole = Callable[[torch.Tensor, Mapping[str, Any]], torch.Tensor]
"""Gathered shares, and what a layer is called with, to the tokens without padding in the shape that the layer takes."""


def share_tokens(module: Any, group: dist.ProcessGroup, whole_of: Whole) -> None:
    """Let a module of column- and row-split Linears be given a rank's share of the tokens; it is run with all of them.

    Args:
        module: An attention or an MLP. Frozen or not by now: Linears that do not train need what they are given once.
        group: Ranks that hold the other shares.
        whole_of: `packed_tokens`, or that of a `TowerTokens`.
    """
    setattr(module, WHOLE, module.forward)
    setattr(module, _SHARED, (group, whole_of))
    module.forward = types.MethodType(opaque(_of_share), module)


def _of_share(module: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    group, whole_of = getattr(module, _SHARED)
    whole = exchanged(hidden_states, lambda share: _gathered(share, group), lambda grad: _summed(grad, group))
    out = getattr(module, WHOLE)(whole_of(whole, kwargs), *args, **kwargs)
    if not (whole.requires_grad and any(p.requires_grad for p in module.parameters())):
        return out
    first, *others = out if isinstance(out, tuple) else (out,)
    first = applied(_GatherAgain, first, hidden_states, whole, group)
    whole.untyped_storage().resize_(0)
    return (first, *others) if isinstance(out, tuple) else first


def packed_tokens(whole: torch.Tensor, called_with: Mapping[str, Any]) -> torch.Tensor:
    """Gather the tokens of layers that take one sequence, `[..., tokens, width]`.

    Attention is called with positions or the number of tokens; an MLP may keep the padding.
    """
    positions = called_with.get("position_embeddings")
    num_tokens = called_with.get("num_tokens") if positions is None else positions[0].shape[-2]
    return whole if num_tokens is None else whole[..., :num_tokens, :]


class TowerTokens:
    """How ranks share the tokens between the layers of an encoder, those of its items one behind the other.

    Args:
        group: Ranks that share the tokens.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._num_per_item = 0
        """Tokens of an item, of a tower whose items are a dimension: always as many."""

    def enter(self, layer: nn.Module) -> None:
        """Let a layer be given whole hidden states, of which it takes this rank's share."""
        layer.register_forward_pre_hook(self._share)

    def leave(self, layer: nn.Module) -> None:
        """Let a layer give whole hidden states."""
        layer.register_forward_hook(self._put_together, with_kwargs=True)

    def whole(self, gathered: torch.Tensor, called_with: Mapping[str, Any]) -> torch.Tensor:
        """As `Whole`."""
        if not self._num_per_item:
            return packed_tokens(gathered, called_with)
        rows = gathered.flatten(0, -2)
        num_items = len(rows) // self._num_per_item
        return rows[: num_items * self._num_per_item].view(num_items, self._num_per_item, -1)

    def _share(self, _layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        whole, *others = given
        share = enter(whole.flatten(0, -2), self._group)
        if whole.dim() > 2:
            self._num_per_item, share = whole.shape[-2], share[None]
            if self._num_per_item < self._group.size():  # padding would count as an item
                message = (
                    f"{self._group.size()} tensor-parallel ranks cannot share items of {self._num_per_item} tokens"
                )
                raise ConfigError(message, where="plan", hint="use a smaller tp")
        return share, *others

    def _put_together(self, _layer: nn.Module, _given: Any, called_with: Mapping[str, Any], out: Any) -> Any:
        share, *others = out if isinstance(out, tuple) else (out,)
        rows = share.flatten(0, -2)
        whole = self.whole(leave(rows, len(rows) * self._group.size(), self._group), called_with)
        return (whole, *others) if isinstance(out, tuple) else whole


def sum_and_share(partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`[..., tokens, width]`, a summand on each rank, to this rank's share of the tokens of the sum, a batch of one."""
    rows = partial.flatten(0, -2)[None] if partial.dim() > 2 else partial
    num_tokens = rows.shape[-2]
    return exchanged(rows, lambda part: _summed(part, group), lambda grad: _gathered(grad, group)[..., :num_tokens, :])


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
