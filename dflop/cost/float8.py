"""What FP8 matmuls save of a layer, and what their casts cost, by a data sheet.

Of a Linear's three products each casts both operands: tokens times what goes in or comes out, and the weight, once per
microbatch. A cast reads a tensor for its largest value, reads it again and writes 8 bit; eager PyTorch does so in six
kernels. So FP8 saves what grows with tokens times weights and pays for what grows with either alone: narrow layers,
small microbatches and eager programs lose.

Linears of attention and of MLPs multiply in FP8; experts and layers without attention over pairs keep their matmuls.
Tensorwise products are taken to gain what the data sheet promises, and bytes of casts are counted; rowwise ones gain
what one published pair of trainings says. Nine published runs are predicted within 10 %, their gains within 3 % where
the same source has bfloat16, too (`python -m tests.bench.published tests/bench/published_fp8.csv`). Launches of casts,
which an eager program has hundreds of in a layer, are not charged.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflop.cost.devices import Device
from dflop.cost.roofline import Program
from dflop.errors import ConfigError
from dflop.records import LayerKind, ModuleSpec


@dataclass(frozen=True, slots=True)
class Recipe:
    """A way of scaling, by torchao's name for it."""

    name: str
    kernel_frac: float
    """Share of the sheet's FP8 rate over its bfloat16 rate that products gain."""


RECIPES = {recipe.name: recipe for recipe in (Recipe("tensorwise", 1.0), Recipe("rowwise", 0.77))}


@dataclass(frozen=True, slots=True)
class Linears:
    """Linears of one layer on one rank that multiply in FP8."""

    num_params: float
    num_in: float
    """Values of a token that go into them."""
    num_out: float
    """And that come out."""


def float8_linears(spec: ModuleSpec, tp: int) -> Linears:
    """FP8 Linears of an average layer; each of `tp` ranks has whole inputs of column and outputs of row Linears."""
    h = spec.hidden_size

    def of(kind: LayerKind) -> tuple[float, float, float]:
        """What several Linears are given counts once: compilers cast it once."""
        attends, multiplies = kind.num_heads > 0, kind.mlp_width > 0 and not kind.num_active_params
        query, key, width = kind.query_width / tp, kind.key_width / tp, multiplies * kind.mlp_width / tp
        num_wide = 1 + kind.is_gated_mlp
        return (
            attends * 2.0 * h * (query + key) + (num_wide + 1) * h * width,
            attends * (h + query) + multiplies * h + width,
            attends * (query + 2.0 * key + h) + multiplies * h + num_wide * width,
        )

    return Linears(
        spec.mean(lambda kind: of(kind)[0]), spec.mean(lambda kind: of(kind)[1]), spec.mean(lambda kind: of(kind)[2])
    )


@dataclass(frozen=True, slots=True)
class Passes:
    """Products of every Linear in a pass over a layer: outputs, gradients of inputs, gradients of weights."""

    out: float
    of_rows: float = 0.0
    of_weights: float = 0.0


def float8_seconds(
    spec: ModuleSpec, tp: int, device: Device, program: Program, recipe: Recipe, passes: Passes
) -> tuple[float, float]:
    """(seconds of a token, seconds of a microbatch) that FP8 adds to a pass over a layer; the former may be negative.

    Raises:
        ConfigError: the device has no FP8 matmuls.
    """
    if not device.fp8_ratio:
        raise ConfigError(
            f"train.fp8 is {recipe.name}, and {device.name} has no FP8 matmuls", where="train.fp8",
            hint="set it to off, or plan for h100, h200 or b200",
        )  # fmt: skip
    linears, products = float8_linears(spec, tp), passes.out + passes.of_rows + passes.of_weights
    matmul_s = 2.0 * linears.num_params * products / (device.peak_bf16_flops * device.matmul_frac)
    gain = device.fp8_ratio * recipe.kernel_frac
    # Inputs are cast for outputs and gradients of weights, gradients for both kinds of gradients.
    cast = (passes.out + passes.of_weights) * linears.num_in + (passes.of_rows + passes.of_weights) * linears.num_out
    cast_s = program.cast_bytes / device.memory_bytes_per_s
    return (1 / gain - 1) * matmul_s + cast_s * cast, cast_s * (passes.out + passes.of_rows) * linears.num_params
