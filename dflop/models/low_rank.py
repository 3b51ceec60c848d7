"""Low-rank adapters of Linears (LoRA, Hu et al., arXiv 2106.09685): `rows @ W.T + scale * (rows @ A.T) @ B.T`.

W does not train. A and B are Linears inside the Linear, named `lora_A` and `lora_B` as in `peft`, so that stages,
tensor parallelism, FSDP2 and checkpoints see them as what they are: parameters with global names. What computes with a
Linear's weight itself (`fused.py`, `float8.py`, row-split Linears) adds the second term by `plus_adapter`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dflop.models.splits import LORA_A, LORA_B

_SCALE = "dflop_lora_scale"


def adapt(linear: nn.Linear, rank: int, scale: float) -> None:
    """Give a Linear an adapter, in place; its values are arbitrary, those of the Linear stay.

    Args:
        linear: Without one.
        rank: Columns of B.
        scale: Factor on what the adapter adds.
    """
    like: Any = {"bias": False, "dtype": linear.weight.dtype, "device": linear.weight.device}
    linear.add_module(LORA_A, nn.Linear(linear.in_features, rank, **like))
    linear.add_module(LORA_B, nn.Linear(rank, linear.out_features, **like))
    setattr(linear, _SCALE, scale)
    linear.forward = types.MethodType(_forward, linear)  # type: ignore[method-assign]  # of this one


def is_adapted(linear: nn.Module) -> bool:
    """Whether a Linear has an adapter."""
    return hasattr(linear, _SCALE)


def move_adapter(source: nn.Module, target: nn.Module) -> None:
    """Give the adapter of a Linear to one that takes its place, whose forward adds it."""
    for name in (LORA_A, LORA_B):
        target.add_module(name, source.get_submodule(name))
    setattr(target, _SCALE, getattr(source, _SCALE))


def plus_adapter(linear: nn.Module, out: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`out` and what a Linear's adapter adds to it, if it has one.

    Args:
        linear: Any.
        out: `[..., out]`; it may be changed in place.
        product: From a weight `[rank, in]` to `rows @ weight.T`, of the rows that made `out`.
    """
    if not is_adapted(linear):
        return out
    weights: Any = linear
    return plus_low_rank(linear, out, product(weights.lora_A.weight))


def plus_low_rank(linear: Any, out: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The same of a Linear with an adapter, given the products with its A, `[..., rank]`."""
    added = F.linear(low * getattr(linear, _SCALE), linear.lora_B.weight)
    # Autograd functions of ours may return views, which it does not let change.
    return out + added if out._is_view() else out.add_(added)


def _forward(linear: Any, input: torch.Tensor) -> torch.Tensor:
    return plus_adapter(linear, F.linear(input, linear.weight, linear.bias), lambda weight: F.linear(input, weight))
