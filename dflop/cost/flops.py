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

from dflop.cost.devices import sheet_of
from dflop.cost.roofline import layer_work
from dflop.models.family import tower_of
from dflop.records import LLM, ModuleLoad, ModuleSpec, SampleShape

FORWARD_ALONE = 1.0, 1.0


class FlopCounter:
    """Counts the FLOPs of global batches of one model.

    Args:
        specs: Modules of the model.
        frozen: Names of modules whose weights take no gradients, or `<encoder>.tower`s.
        adapted: Names of modules of which low-rank adapters train, whose own FLOPs, about a percent, are left out.
    """

    def __init__(
        self, specs: Sequence[ModuleSpec], frozen: Collection[str] = (), adapted: Collection[str] = ()
    ) -> None:
        self._specs = tuple(specs)
        self._passes = {spec.module: _passes(spec.module, specs, frozen, adapted) for spec in specs}

    def count(self, batch: Iterable[SampleShape]) -> float:
        """FLOPs of forward and backward of a global batch, all modules together; microseconds per sample."""
        loads = _loads(batch, self._specs)
        heads = sum(
            self._passes[s.module][0] * 2.0 * s.vocab_size * s.hidden_size * loads[s.module].num_items
            for s in self._specs
        )
        return heads + sum(_forward_flops(s, loads[s.module], *self._passes[s.module]) for s in self._specs)

    def count_again(self, batch: Iterable[SampleShape], recomputed: Collection[str]) -> float:
        """FLOPs of the forward passes that the layers of some modules run once more in their backward pass.

        Layers without a backward pass run nothing again, whatever their plan says.
        """
        loads = _loads(batch, self._specs)
        again = [s for s in self._specs if s.module in recomputed and self._passes[s.module] != FORWARD_ALONE]
        return sum(_forward_flops(s, loads[s.module], *FORWARD_ALONE) for s in again)


def _loads(batch: Iterable[SampleShape], specs: Sequence[ModuleSpec]) -> dict[str, ModuleLoad]:
    shapes, nothing = list(batch), ModuleLoad(0, 0, 0)
    return {spec.module: sum((shape.load(spec.module) for shape in shapes), nothing) for spec in specs}


def _forward_flops(spec: ModuleSpec, load: ModuleLoad, weights: float, attention: float) -> float:
    """So many forward passes of the layers of a module: over its weights, and over its attention."""
    once = layer_work(spec)
    return spec.num_layers * (
        weights * once.matmul_flops * load.num_tokens + attention * once.attention_flops * load.sum_sq_tokens
    )


def peak_flops_per_s(hardware: str, dtype: str) -> float:
    """Dense peak of one device by its data sheet; NaN where none is known for this device and type.

    Args:
        hardware: Name of the device, as its driver or a person gives it.
        dtype: Of the model; data sheets here tell bfloat16 alone.
    """
    sheet = sheet_of(hardware) if dtype == "bfloat16" else None
    return math.nan if sheet is None else sheet.peak_bf16_flops


def _passes(
    module: str, specs: Sequence[ModuleSpec], frozen: Collection[str], adapted: Collection[str]
) -> tuple[float, float]:
    """Forward passes that forward and backward are worth: of matmuls with weights, of attention, which has none.

    A frozen tower runs no backward pass, and what its projector does is not counted.
    """
    if module not in frozen and tower_of(module) not in frozen:
        return (2.0 if module in adapted else 3.0), 3.0
    has_trained_input = module == LLM and any(s.module not in frozen for s in specs if s.module != LLM)
    return (2.0, 3.0) if has_trained_input else FORWARD_ALONE
