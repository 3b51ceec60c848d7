"""RMS norms and MLPs of Hugging Face's layers that keep less for the backward pass, with the same parameters.

Hugging Face's eager RMS norm keeps its input in 32 bit and what it makes before its weight; here the input in its own
type and one number per row. Hugging Face's MLPs keep what the activation makes, and behind a gate the product, too:
both are elementwise, and made again from what goes in (Korthikanti et al., arXiv 2205.05198, section 5; Liger kernel,
arXiv 2410.10989). Of a gated MLP that leaves two tensors of its width instead of four, of a plain one one instead of
two. Whisper's layers hold their two Linears themselves; they stay Hugging Face's. `fusing.py` says which modules
these are.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from dflop.models.autograd import applied
from dflop.models.low_rank import Dropout, dropout_of, is_adapted, plus_low_rank
from dflop.models.matmuls import MATMULS, PLAIN, Matmuls

Activation = Callable[[torch.Tensor], torch.Tensor]
Forward = Callable[[Any, torch.Tensor], torch.Tensor]
"""Forward pass of a module, by its parameters and attributes."""


def unfuse(layers: Iterable[nn.Module]) -> None:
    """Give the norms and MLPs of layers their own forwards back."""
    for module in (module for layer in layers for module in layer.modules()):
        own = vars(module).get("forward")
        if isinstance(own, types.MethodType) and own.__func__.__module__ == __name__:
            del module.forward


def linear_patches(model: nn.Module) -> None:
    """Let 3D convolutions that are given one patch at a time be Linears over its values: the same sums of products.

    Under some pairs of torch and cuDNN the convolution takes 10 to 20 times as long as the rest of a vision tower.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv3d) and module.groups == 1 and not any(module.padding):
            module.forward = types.MethodType(_patches, module)  # type: ignore[method-assign]  # of this one


def _patches(conv: nn.Conv3d, values: torch.Tensor) -> torch.Tensor:
    if values.dim() != 5 or values.shape[2:] != conv.kernel_size:
        return nn.Conv3d.forward(conv, values)
    return F.linear(values.flatten(1), conv.weight.flatten(1), conv.bias)[..., None, None, None]


def norm_forwards(epsilon: str) -> Iterator[Forward]:
    """Forwards that an RMS norm with a weight may have, the first as Llama's.

    Args:
        epsilon: Attribute that is added to the variance.
    """
    yield from (_rms_norm(epsilon, *how) for how in ((0.0, False), (0.0, True), (1.0, True)))


def _rms_norm(epsilon: str, offset: float, rounds_last: bool) -> Forward:
    """Scales by `offset + weight`; `rounds_last`: in 32 bit, where the others round what they scale."""

    def forward(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.is_cuda and not offset:  # one kernel, which keeps as little
            return F.rms_norm(hidden, norm.weight.shape, norm.weight, getattr(norm, epsilon))
        return applied(_RmsNorm, hidden, norm.weight, getattr(norm, epsilon), offset, rounds_last)

    return forward


def mlp_forward(gate: str, up: str, down: str, activation: str) -> Forward:
    """Forward pass of an MLP with these children; `gate` is empty where it has none."""

    def forward(mlp: Any, hidden: torch.Tensor) -> torch.Tensor:
        wide = getattr(mlp, up)(hidden)
        gating = getattr(mlp, gate)(hidden) if gate else None
        return linear_of_activation(getattr(mlp, down), getattr(mlp, activation), wide, gating)

    return forward


def packed_mlp_forward(into: str, down: str, activation: str, gate: int) -> Forward:
    """Forward pass of an MLP whose first Linear makes the gate and what it multiplies; `gate`: which half it is."""

    def forward(mlp: Any, hidden: torch.Tensor) -> torch.Tensor:
        halves = getattr(mlp, into)(hidden).chunk(2, dim=-1)
        return linear_of_activation(getattr(mlp, down), getattr(mlp, activation), halves[1 - gate], halves[gate])

    return forward


def linear_of_activation(
    linear: Any, activation: Activation, wide: torch.Tensor, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear(activation(wide))`, or `linear(activation(gate) * wide)`, keeping `wide` and `gate` alone.

    Args:
        linear: A Linear, with an adapter or without, one that holds some of the inputs and sums over ranks by its
            `sum_parts`, or one with another `Matmuls` than `PLAIN`.
        activation: Elementwise, without parameters.
        wide: `[..., in]`.
        gate: `[..., in]` or None.
    """
    sum_parts = getattr(linear, "sum_parts", None)
    bias = None if sum_parts else linear.bias
    matmuls = getattr(linear, MATMULS, PLAIN)
    if is_adapted(linear):
        low = linear.lora_A.weight, dropout_of(linear)
        made: Any = applied(_LinearOfActivation, activation, wide, gate, linear.weight, bias, matmuls, *low)
        out = plus_low_rank(linear, *made)
    else:
        out = applied(_LinearOfActivation, activation, wide, gate, linear.weight, bias, matmuls, None, None)
    return sum_parts(out) if sum_parts else out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float, rounds_last: bool
    ) -> torch.Tensor:
        exact = _precise(hidden)
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(hidden, weight, scale)
        ctx.offset = offset
        if rounds_last:
            return ((exact * scale) * (_precise(weight) + offset)).to(hidden.dtype)
        return weight * (exact * scale).to(hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, scale = ctx.saved_tensors
        normed = _precise(hidden) * scale
        of_hidden = of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            weighted = grad * (_precise(weight) + ctx.offset)
            along = (weighted * normed).mean(-1, keepdim=True)
            of_hidden = weighted.sub_(normed.mul_(along)).mul_(scale).to(hidden.dtype)
        return of_hidden, of_weight, None, None, None


def _precise(tensor: torch.Tensor) -> torch.Tensor:
    """In 32 bit at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class _LinearOfActivation(torch.autograd.Function):
    """What a Linear makes of an activation, and another one without a bias (`low`, of an adapter) of the same."""

    @staticmethod
    def forward(
        ctx: Any, activation: Activation, wide: torch.Tensor, gate: torch.Tensor | None,
        weight: torch.Tensor, bias: torch.Tensor | None, matmuls: Matmuls, low: torch.Tensor | None,
        dropout: Dropout | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        ctx.activation, ctx.matmuls, ctx.dropout = activation, matmuls, dropout or _unchanged
        ctx.save_for_backward(wide, gate, weight, low)
        made = activation(wide) if gate is None else activation(gate).mul_(wide)
        out = matmuls.out(made, weight, bias)
        return out if low is None else (out, PLAIN.out(ctx.dropout(made), low))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *grad_low: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wide, gate, weight, low = ctx.saved_tensors
        source = (wide if gate is None else gate).detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.activation(source)
        # Its values may go before its gradient comes.
        edge, active = get_gradient_edge(out), out.detach()
        del out
        matmuls, of_weight, of_bias, of_low = ctx.matmuls, None, None, None
        if ctx.needs_input_grad[3]:
            of_weight = matmuls.of_weight(grad, active if gate is None else active * wide)
        if ctx.needs_input_grad[4]:
            of_bias = grad.flatten(0, -2).sum(0)
        if ctx.needs_input_grad[6]:
            of_low = PLAIN.of_weight(grad_low[0], ctx.dropout(active if gate is None else active * wide))
        if not any(ctx.needs_input_grad[1:3]):
            return None, None, None, of_weight, of_bias, None, of_low, None
        if gate is None:
            del active
        of_made = matmuls.of_rows(grad, weight)
        if low is not None:
            of_made += ctx.dropout(PLAIN.of_rows(grad_low[0], low))
        if gate is None:
            (of_wide,) = torch.autograd.grad(edge, source, of_made)
            return None, of_wide, None, of_weight, of_bias, None, of_low, None
        of_wide = active.mul_(of_made)
        (of_gate,) = torch.autograd.grad(edge, source, of_made.mul_(wide))
        return None, of_wide, of_gate, of_weight, of_bias, None, of_low, None


def _unchanged(values: torch.Tensor) -> torch.Tensor:
    return values
