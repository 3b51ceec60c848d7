"""Messages between ranks under autograd, and where a message between two ranks must lie.

Sums are formed in place and in the type of the tensor. They are not formed of a tensor without elements: the ranks of a
tensor-parallel group have the same input, so it is empty on all of them. Those of a context-parallel group do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dflop.models.autograd import applied

Exchange = Callable[[torch.Tensor], torch.Tensor]


def message_device(device: torch.device, group: dist.ProcessGroup | None = None) -> torch.device:
    """Where a tensor must lie to be sent or received: on `device`, but gloo reads and writes host memory only.

    Ranks that share one GPU have to use gloo, for NCCL wants a device per rank.
    """
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else device


def all_reduce(values: torch.Tensor, group: dist.ProcessGroup, *, maximum: bool = False) -> torch.Tensor:
    """Combine `values` of all ranks in place, by their sum or their maximum; collective."""
    if values.numel():
        dist.all_reduce(values, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=group)
    return values


def exchanged(tensor: torch.Tensor, there: Exchange, back: Exchange) -> torch.Tensor:
    """`there` of a tensor, whose gradient is `back` of the result's."""
    return applied(_Exchanged, tensor, there, back)


def sum_backward(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The same tensor; the gradients, a part of the sum on every rank, are summed over the ranks.

    Args:
        whole: Equal on all ranks. What reads the result must give it a gradient of its own making, as Linears do.
        group: Ranks that compute the other parts of what depends on `whole`.
    """
    return exchanged(whole, lambda values: values.view_as(values), lambda grad: all_reduce(grad.contiguous(), group))


def all_to_all(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Rows that the ranks of a group send to this one, by rank; collective, and so is the way back of their gradients.

    Args:
        rows: `[rows, ...]`, those for the first rank first.
        sent: How many go to each rank.
        received: How many come from each rank.
        group: Of whose ranks any may send and receive nothing.
    """
    return exchanged(
        rows, lambda own: _all_to_all(own, sent, received, group), lambda grad: _all_to_all(grad, received, sent, group)
    )


def all_to_alls(
    tensors: tuple[torch.Tensor, ...], sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> tuple[torch.Tensor, ...]:
    """`all_to_all` of several tensors, one after the other in both passes, whichever gradient is there first."""
    found: tuple[torch.Tensor, ...] = _ExchangedTogether.apply(  # type: ignore[no-untyped-call]  # torch's is not typed
        lambda own: _all_to_all(own, sent, received, group), lambda grad: _all_to_all(grad, received, sent, group),
        *tensors,
    )  # fmt: skip
    return found


def _all_to_all(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    given = rows.to(message_device(rows.device, group)).contiguous()
    found = given.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(found, given, list(received), list(sent), group=group)
    return found.to(rows.device)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, there: Exchange, back: Exchange) -> torch.Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grad), None, None


class _ExchangedTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, there: Exchange, back: Exchange, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.back = back
        return tuple(map(there, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *map(ctx.back, grads)
