"""FP8 matmuls in the Linears of decoder layers, by the recipes and casts of torchao (`torchao.float8`).

Both operands of a product are scaled to the range of an 8-bit type, by one number (tensorwise) or one per row
(rowwise), and multiplied in 8 bit; results, weights, gradients and what is kept for the backward pass stay in the
model's type (Micikevicius et al., arXiv 2209.05433). torchao's `Float8Linear` computes gradients of frozen weights,
too, and keeps their inputs, and a fused MLP (`fused.py`) makes the input of its last Linear again: so torchao's casts
and products are called from autograd functions of ours. A CPU multiplies the same 8-bit values in float32.

A tensor-parallel rank scales the part of a weight that it holds, which no message has to find; FSDP2 gathers weights in
the model's type. Experts, heads, encoders, adapters, and Linears whose sizes are no multiples of 16 stay as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from dflop.errors import ConfigError
from dflop.models.autograd import applied
from dflop.models.low_rank import plus_adapter
from dflop.models.matmuls import MATMULS, Matmuls
from dflop.models.splits import is_column_or_row

ALIGNMENT = 16
"""Both sizes of a weight are multiples of it, as the kernels ask for; rows are padded to it."""
MIN_CAPABILITY = 8, 9
"""Least capability of a CUDA device that multiplies in 8 bit: Ada, Hopper and later."""


def use_float8(layers: Iterable[nn.Module], recipe: str, device: torch.device) -> None:
    """Let the column and row Linears of layers multiply in FP8, in place.

    Args:
        layers: As they are to run, but for compiling.
        recipe: `tensorwise` or `rowwise`.
        device: Of the layers.

    Raises:
        ConfigError: torchao is missing, the device has no FP8 matmuls, or no Linear has sizes for them.
    """
    layers = list(layers)
    emulate = _check_device(recipe, device)
    chosen = [linear for layer in layers for linear in _linears(layer)]
    if layers and not chosen:
        raise ConfigError(
            f"no Linear of {type(layers[0]).__name__} has sizes that are multiples of {ALIGNMENT}, as FP8 needs",
            where="train.fp8", hint="set it to off",
        )  # fmt: skip
    for linear in chosen:
        setattr(linear, MATMULS, matmuls_of(recipe, emulate))
        linear.forward = types.MethodType(_forward, linear)


def _check_device(recipe: str, device: torch.device) -> bool:
    """Whether FP8 has to be emulated."""
    if device.type == "cuda" and (have := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        name, needed = torch.cuda.get_device_name(device), ".".join(map(str, MIN_CAPABILITY))
        raise ConfigError(
            f"train.fp8 is {recipe}, and {name} (compute capability {have[0]}.{have[1]}) has no FP8 matmuls",
            where="train.fp8", hint=f"set it to off, or use devices of capability {needed} or later, such as H100",
        )  # fmt: skip
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError as error:
        raise ConfigError(
            f"train.fp8 is {recipe}, and torchao cannot be imported: {error}", where="train.fp8",
            hint="pip install 'dflop[fp8]', or set it to off",
        ) from None  # fmt: skip
    convert_to_float8_training(nn.Identity())  # of no Linear: what it mends in compilers is in force from then on
    return device.type == "cpu"


def _linears(layer: nn.Module) -> Iterator[Any]:
    for name, module in layer.named_modules():
        is_aligned = isinstance(module, nn.Linear) and not any(size % ALIGNMENT for size in module.weight.shape)
        if is_aligned and is_column_or_row(name):
            yield module


def _forward(linear: Any, hidden: torch.Tensor) -> torch.Tensor:
    """As the Linear's own, or as that of a `RowSplitLinear`."""
    matmuls: Float8Matmuls = getattr(linear, MATMULS)
    out = applied(_Linear, hidden, linear.weight, matmuls.recipe, matmuls.emulate)
    out = plus_adapter(linear, out, hidden)
    sum_parts = getattr(linear, "sum_parts", None)
    if sum_parts is not None:
        summed: torch.Tensor = sum_parts(out)
        return summed
    return out if linear.bias is None else out + linear.bias


@functools.cache
def matmuls_of(recipe: str, emulate: bool) -> Float8Matmuls:
    """The products of a recipe; always the same object, which compiled layers look up."""
    return Float8Matmuls(recipe, emulate=emulate)


class Float8Matmuls(Matmuls):
    """Products of which both operands are cast to 8 bit.

    Args:
        recipe: Of `torchao.float8`.
        emulate: Multiply the 8-bit values in float32.
    """

    def __init__(self, recipe: str, *, emulate: bool) -> None:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

        self.recipe, self.emulate = recipe, emulate
        self._config = config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
        gemms = config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight
        self._products = LinearMMConfig(*(ScaledMMConfig(emulate, g.use_fast_accum, False, True) for g in gemms))

    def out(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """As of `Matmuls`; 8 bits of `rows` and of `weight`."""
        c, flat = self._config, rows.flatten(0, -2)
        left = self._cast(flat, c.cast_config_input, "INPUT", -1)
        made = torch.mm(left, self._cast(weight.t(), c.cast_config_weight, "WEIGHT", 0))
        made = made.view(*rows.shape[:-1], len(weight))
        return made if bias is None else made + bias

    def of_rows(self, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """As of `Matmuls`; 8 bits of `grad` and of `weight`."""
        c, flat = self._config, grad.flatten(0, -2)
        left = self._cast(flat, c.cast_config_grad_output, "GRAD_OUTPUT", -1)
        right = self._cast(weight.t(), c.cast_config_weight_for_grad_input, "WEIGHT", -1)
        return torch.mm(left, right.t()).view(*grad.shape[:-1], weight.shape[1])

    def of_weight(self, grad: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """As of `Matmuls`; 8 bits of `grad` and of `rows`."""
        c, flat = self._config, grad.flatten(0, -2)
        left = self._cast(flat, c.cast_config_grad_output_for_grad_weight, "GRAD_OUTPUT", 0)
        right = self._cast(rows.flatten(0, -2), c.cast_config_input_for_grad_weight, "INPUT", 0)
        return torch.mm(left.t(), right)

    def _cast(self, tensor: torch.Tensor, cast: Any, role: str, dim: int) -> torch.Tensor:
        """A scaled copy; where the recipe has a scale per row, rows lie along `dim`."""
        from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import GemmInputRole

        made: torch.Tensor = hp_tensor_to_float8_dynamic(
            tensor,
            cast.target_dtype,
            self._products,
            gemm_input_role=GemmInputRole[role],
            scaling_granularity=cast.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(dim, cast.scaling_granularity),
            round_scales_to_power_of_2=self._config.round_scales_to_power_of_2,
        )
        return made


@torch._dynamo.allow_in_graph
class _Linear(torch.autograd.Function):
    """`rows @ weight.T`, which keeps what a Linear keeps."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, recipe: str, emulate: bool) -> torch.Tensor:
        ctx.matmuls = matmuls = matmuls_of(recipe, emulate)
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight)
        return matmuls.out(rows, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        rows, weight = ctx.saved_tensors
        of_rows = ctx.matmuls.of_rows(grad, weight) if ctx.needs_input_grad[0] else None
        of_weight = ctx.matmuls.of_weight(grad, rows) if ctx.needs_input_grad[1] else None
        return of_rows, of_weight, None, None
