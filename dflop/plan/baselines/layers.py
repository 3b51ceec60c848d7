"""Layers cut evenly by count, whatever they cost: what trainers do that look at no data."""

from __future__ import annotations

from collections.abc import Sequence

from dflop.records import ModuleSpec


def even_layers(num_layers: int, pp: int) -> tuple[int, ...]:
    """Layers per stage of one module, the remainder on the first stages."""
    size, extra = divmod(num_layers, pp)
    return tuple(size + (stage < extra) for stage in range(pp))


def even_chain(specs: Sequence[ModuleSpec], pp: int) -> dict[str, tuple[int, ...]]:
    """Layers per module and stage of one chain: encoders whole on the first stage, with fewer of the LLM's layers.

    The first stage takes what its even share of all layers leaves the LLM; the other stages share the rest evenly.
    """
    *encoders, llm = specs
    num_before = sum(spec.num_layers for spec in encoders)
    share = -(-(num_before + llm.num_layers) // pp)
    on_first = llm.num_layers if pp == 1 else max(0, share - num_before)
    if encoders and on_first < llm.num_entry_layers:
        on_first = 0
    rest = even_layers(llm.num_layers - on_first, pp - 1) if pp > 1 else ()
    whole = {spec.module: (spec.num_layers, *[0] * (pp - 1)) for spec in encoders}
    return {**whole, llm.module: (on_first, *rest)}
