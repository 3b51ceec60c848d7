"""Messages between ranks under autograd, and where a message between two ranks must lie.

Sums are formed in place and in the type of the tensor. A tensor without elements is not exchanged: the ranks of a group
have the same input, so it is empty on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
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


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, there: Exchange, back: Exchange) -> torch.Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grad), None, None
