"""Floating point operations that a global batch asks of a model, and how many its devices could do: the parts of MFU.

Model FLOPs, as in PaLM's model FLOPs utilisation: what the mathematics needs, so that recomputation, padding and tricks
of kernels count for nothing. A layer's forward pass is that of `roofline.layer_work`; a backward pass takes twice its
forward; where weights are frozen and what is before them is not, matmuls with weights take once. The head works on
tokens that carry loss, embeddings are looked up. An encoder's patch embedding and projector are left out, some percent
of an encoder, and norms and biases inside the layers count as matmuls, less than a thousandth: utilisation comes out
low rather than high.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from dflop.cost.devices import find_device
from dflop.cost.roofline import layer_work
from dflop.errors import CostError
from dflop.models.family import tower_of
from dflop.records import LLM, ModuleSpec, SampleShape

SLOWER_VARIANTS = ("pcie", "nvl", "mig")
"""In device names: other boards of the same chip, and slices of one, whose peak is another."""
FORWARD_ALONE = 1.0, 1.0


class FlopCounter:
    """Counts the FLOPs of global batches of one model.

    Args:
        specs: Modules of the model.
        frozen: Names of modules whose weights take no gradients, or `<encoder>.tower`s.
    """

    def __init__(self, specs: Sequence[ModuleSpec], frozen: Collection[str] = ()) -> None:
        self._specs = tuple(specs)
        self._passes = {spec.module: _passes(spec.module, specs, frozen) for spec in specs}

    def count(self, batch: Iterable[SampleShape]) -> float:
        """FLOPs of forward and backward of a global batch, all modules together; microseconds per sample."""
        load = _load(batch, self._specs)
        heads = sum(
            self._passes[spec.module][0] * 2.0 * spec.vocab_size * spec.hidden_size * load.num_loss_tokens
            for spec in self._specs
        )
        return heads + sum(_forward_flops(spec, load, *self._passes[spec.module]) for spec in self._specs)

    def count_again(self, batch: Iterable[SampleShape], recomputed: Collection[str]) -> float:
        """FLOPs of the forward passes that the layers of some modules run once more in their backward pass.

        Layers without a backward pass run nothing again, whatever their plan says.
        """
        load = _load(batch, self._specs)
        again = [s for s in self._specs if s.module in recomputed and self._passes[s.module] != FORWARD_ALONE]
        return sum(_forward_flops(spec, load, *FORWARD_ALONE) for spec in again)


@dataclass(frozen=True, slots=True)
class _Load:
    num_tokens: dict[str, int]
    sum_sq_tokens: dict[str, int]
    num_loss_tokens: int


def _load(batch: Iterable[SampleShape], specs: Sequence[ModuleSpec]) -> _Load:
    tokens = dict.fromkeys((spec.module for spec in specs), 0)
    sq_tokens, num_loss_tokens = dict(tokens), 0
    for shape in batch:
        num_loss_tokens += shape.num_supervised_tokens
        tokens[LLM] += shape.num_llm_tokens
        sq_tokens[LLM] += shape.num_llm_tokens**2
        for item in shape.items:
            tokens[item.module] += item.num_tokens
            sq_tokens[item.module] += item.sum_sq_tokens
    return _Load(tokens, sq_tokens, num_loss_tokens)


def _forward_flops(spec: ModuleSpec, load: _Load, weights: float, attention: float) -> float:
    """So many forward passes of the layers of a module: over its weights, and over its attention."""
    once, name = layer_work(spec), spec.module
    return spec.num_layers * (
        weights * once.matmul_flops * load.num_tokens[name]
        + attention * once.attention_flops * load.sum_sq_tokens[name]
    )


def peak_flops_per_s(hardware: str, dtype: str) -> float:
    """Dense peak of one device by its data sheet; NaN where none is known for this device and type.

    Args:
        hardware: Name of the device, as its driver or a person gives it.
        dtype: Of the model; data sheets here tell bfloat16 alone.
    """
    if dtype != "bfloat16" or any(variant in hardware.lower() for variant in SLOWER_VARIANTS):
        return math.nan
    try:
        return find_device(hardware).peak_bf16_flops
    except CostError:
        return math.nan


def _passes(module: str, specs: Sequence[ModuleSpec], frozen: Collection[str]) -> tuple[float, float]:
    """Forward passes that forward and backward are worth: of matmuls with weights, of attention, which has none.

    A frozen tower runs no backward pass, and what its projector does is not counted.
    """
    if module not in frozen and tower_of(module) not in frozen:
        return 3.0, 3.0
    has_trained_input = module == LLM and any(s.module not in frozen for s in specs if s.module != LLM)
    return (2.0, 3.0) if has_trained_input else FORWARD_ALONE
