"""Layers cut evenly by count, whatever they cost: what trainers do that look at no data."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dflop.records import ModuleSpec


def even_layers(num_layers: int, pp: int) -> tuple[int, ...]:
    """Layers per stage of one module, the remainder on the first stages."""
    size, extra = divmod(num_layers, pp)
    return tuple(size + (stage < extra) for stage in range(pp))


def even_chain(specs: Sequence[ModuleSpec], pp: int) -> dict[str, tuple[int, ...]]:
    """Layers per module and stage when all modules, one behind the other, are one chain of layers."""
    stages = even_layers(sum(spec.num_layers for spec in specs), pp)
    stage_ends = [0, *itertools.accumulate(stages)]
    module_ends = [0, *itertools.accumulate(spec.num_layers for spec in specs)]
    return {
        spec.module: tuple(
            max(0, min(stage_end, end) - max(stage_start, start))
            for stage_start, stage_end in itertools.pairwise(stage_ends)
        )
        for spec, (start, end) in zip(specs, itertools.pairwise(module_ends), strict=True)
    }
