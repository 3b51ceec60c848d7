"""A chain of work cut into stages: the slowest stage as fast as possible, then all of them as even as possible.

The linear partition problem, exactly, by dynamic programming over cut positions: two passes of S N^2 steps for N units
and S stages, each step an array call. Baselines cut by count instead, whatever layers cost.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflop.cost.model import Floats
from dflop.records import LLM, ModuleSpec
from dflop.schedule.items import Ints

Cuts = tuple[int, ...]
"""`cuts[stage]` = first unit of a stage, and at the end the number of units."""
ROUNDING = 1.0 + 1e-12


def best_cuts(stage_s: Floats) -> Cuts | None:
    """Cuts of units into contiguous stages of at least one unit each.

    Args:
        stage_s: `[S, N + 1, N + 1]` seconds of each stage with the units from one position up to another; infinite
            where it may not hold them.

    Returns:
        None when nothing is left.
    """
    slowest_s = _sweep(stage_s, np.maximum)[0][-1]
    if slowest_s == np.inf:
        return None
    even = np.where(stage_s <= slowest_s * ROUNDING, stage_s, np.inf) ** 2
    _, came_from = _sweep(even, np.add)
    cuts = [stage_s.shape[1] - 1]
    for stage in reversed(range(len(stage_s))):
        cuts.append(int(came_from[stage][cuts[-1]]))
    return tuple(reversed(cuts))


def _sweep(stage_value: Floats, combine: np.ufunc) -> tuple[Floats, list[npt.NDArray[np.intp]]]:
    """Least value of a chain up to each position, and per stage where that stage begins.

    `stage_value` is `[S, N + 1, N + 1]`, `combine` adds up a chain.
    """
    best: Floats = np.where(np.arange(stage_value.shape[1]) == 0, 0.0, np.inf)
    came_from = []
    for values in stage_value:
        total = combine(best[:, np.newaxis], values)
        came_from.append(total.argmin(axis=0))
        best = total.min(axis=0)
    return best, came_from


def range_seconds(seconds: Sequence[float]) -> Floats:
    """`[N + 1, N + 1]` of the units from one position up to another; infinite where there are none."""
    ends = np.concatenate([[0.0], np.cumsum(seconds)])
    found: Floats = np.where(np.tri(len(ends), dtype=bool), np.inf, ends[np.newaxis, :] - ends[:, np.newaxis])
    return found


@functools.lru_cache(maxsize=16384)
def free_cuts(seconds: tuple[float, ...], num_stages: int) -> Cuts:
    """With nothing forbidden; remembered, since plans ask for the same chains again and again."""
    cuts = best_cuts(np.broadcast_to(range_seconds(seconds), (num_stages, len(seconds) + 1, len(seconds) + 1)))
    assert cuts is not None, f"{len(seconds)} units cannot fill {num_stages} stages"
    return cuts


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


def unit_layers_of(specs: Sequence[ModuleSpec], num_modules: int) -> Ints:
    """`[modules, units]`: layers of each module in each unit that can be cut off.

    Rows of encoders on other ranks go to the first stage, so the LLM begins there if some of the modules are not here.
    """
    sizes = [_unit_sizes(spec) for spec in specs]
    owner = np.repeat(np.arange(len(sizes)), [len(part) for part in sizes])
    units: Ints = (owner == np.arange(len(sizes))[:, np.newaxis]) * np.concatenate(sizes)
    if specs[-1].module == LLM and 1 < len(specs) < num_modules:
        end = len(owner) - len(sizes[-1]) + 1
        units = np.concatenate([units[:, :end].sum(axis=1, keepdims=True), units[:, end:]], axis=1)
    return units


def _unit_sizes(spec: ModuleSpec) -> list[int]:
    """Layers of each unit of a module."""
    if spec.max_pp == 1:
        return [spec.num_layers]
    return [spec.num_entry_layers, *[1] * (spec.num_layers - spec.num_entry_layers)]
