"""Low-rank adapters of Linears (LoRA, Hu et al., arXiv 2106.09685): `rows @ W.T + scale * (rows @ A.T) @ B.T`.

W does not train. A and B are Linears inside the Linear, named `lora_A` and `lora_B` as in `peft`, so that stages,
tensor parallelism, FSDP2 and checkpoints see them as what they are: parameters with global names. What computes with a
Linear's weight itself (`fused.py`, `float8.py`, row-split Linears) adds the second term by `plus_adapter`.

Dropout is on what A is given, as in `peft`. Nothing is kept for it: a pass draws a seed, and the backward pass draws
the same mask from it again. Seeds come from torch's own generator, which every step sets anew and a layer that runs
again sets back, so another layout or packing draws other masks.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from dflop.models.autograd import applied
from dflop.models.matmuls import PLAIN
from dflop.models.splits import LORA_A, LORA_B

_SCALE = "dflop_lora_scale"
_DROPOUT = "dflop_lora_dropout"
INPUT_SHARE = "dflop_input_share"
"""Attribute of a Linear that holds some of the inputs: which, so that ranks drop different ones."""


@dataclass(frozen=True, slots=True)
class Dropout:
    """Sets values to zero at random, the same ones of as many, and scales the others up."""

    frac: float
    seed: int

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """A new tensor."""
        generator = torch.Generator(values.device).manual_seed(self.seed)
        kept = torch.empty(values.shape, dtype=values.dtype, device=values.device)
        return kept.bernoulli_(1 - self.frac, generator=generator).mul_(values).div_(1 - self.frac)


def adapt(linear: nn.Linear, rank: int, scale: float, dropout: float = 0.0) -> None:
    """Give a Linear an adapter, in place; its values are arbitrary, those of the Linear stay.

    Args:
        linear: Without one.
        rank: Columns of B.
        scale: Factor on what the adapter adds.
        dropout: Share of what A is given that is zero in training.
    """
    like: Any = {"bias": False, "dtype": linear.weight.dtype, "device": linear.weight.device}
    linear.add_module(LORA_A, nn.Linear(linear.in_features, rank, **like))
    linear.add_module(LORA_B, nn.Linear(rank, linear.out_features, **like))
    setattr(linear, _SCALE, scale)
    setattr(linear, _DROPOUT, float(dropout))
    linear.forward = types.MethodType(_forward, linear)  # type: ignore[method-assign]  # of this one


def is_adapted(linear: nn.Module) -> bool:
    """Whether a Linear has an adapter."""
    return hasattr(linear, _SCALE)


def move_adapter(source: nn.Module, target: nn.Module) -> None:
    """Give the adapter of a Linear to one that takes its place, whose forward adds it."""
    for name in (LORA_A, LORA_B):
        target.add_module(name, source.get_submodule(name))
    for name in (_SCALE, _DROPOUT):
        setattr(target, name, getattr(source, name))


def dropout_of(linear: Any) -> Dropout | None:
    """What a pass drops of the input of a Linear's adapter; draws a seed if it drops any."""
    frac = getattr(linear, _DROPOUT)
    if not frac or not linear.training:
        return None
    return Dropout(frac, int(torch.randint(1 << 62, ())) + getattr(linear, INPUT_SHARE, 0))


def plus_adapter(linear: nn.Module, out: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`out` and what a Linear's adapter adds to it, if it has one.

    Args:
        linear: Any.
        out: `[..., out]`; it may be changed in place.
        rows: `[..., in]`, that made it.
    """
    if not is_adapted(linear):
        return out
    weights: Any = linear
    dropout = dropout_of(linear)
    if dropout is None:
        return plus_low_rank(linear, out, F.linear(rows, weights.lora_A.weight))
    return plus_low_rank(linear, out, applied(_ProductOfDropped, rows, weights.lora_A.weight, dropout))


def plus_low_rank(linear: Any, out: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The same of a Linear with an adapter, given the products with its A, `[..., rank]`."""
    added = F.linear(low * getattr(linear, _SCALE), linear.lora_B.weight)
    # Autograd functions of ours may return views, which it does not let change.
    return out + added if out._is_view() else out.add_(added)


def _forward(linear: Any, input: torch.Tensor) -> torch.Tensor:
    return plus_adapter(linear, F.linear(input, linear.weight, linear.bias), input)


class _ProductOfDropped(torch.autograd.Function):
    """`dropout(rows) @ weight.T`, keeping the rows alone."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, dropout: Dropout) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.dropout = dropout
        return PLAIN.out(dropout(rows), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        of_rows = ctx.dropout(PLAIN.of_rows(grad, weight)) if ctx.needs_input_grad[0] else None
        of_weight = PLAIN.of_weight(grad, ctx.dropout(rows)) if ctx.needs_input_grad[1] else None
        return of_rows, of_weight, None
