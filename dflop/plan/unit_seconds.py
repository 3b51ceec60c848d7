"""Seconds of a layer and of all that is outside the layers, for chains of every number of microbatches at once.

And steps of replicas that meet in every microbatch: those that share out parameters, each of them on one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop.cost.model import Floats
from dflop.plan.candidates import layer_and_edge_seconds, nearest_power
from dflop.plan.space import Problem
from dflop.records import LLM, ModuleSpec, RunMode
from dflop.simulate.step import with_messages


@dataclass(frozen=True, slots=True)
class UnitSeconds:
    """A module's (layer, edge, what a layer takes longer when it runs again), forward and backward."""

    typical_s: tuple[Floats, Floats, Floats]
    """`[powers]` at the typical load of 1, 2, 4, ... buckets."""
    heaviest_s: tuple[Floats, Floats, Floats]
    """`[S]` of the heaviest unit of work."""
    average_s: tuple[Floats, Floats, Floats]
    """`[B, S]` of the average of 1 to B buckets; beyond, units do not divide."""


def unit_seconds(
    problem: Problem, specs: Sequence[ModuleSpec], module: str, mode: RunMode, *, again: bool
) -> UnitSeconds:
    """Worked out once for all numbers of microbatches; `specs` share the ranks, `again`: layers may run again."""

    def seconds(load: Floats) -> tuple[Floats, Floats, Floats]:
        layer_s, edge_s = layer_and_edge_seconds(problem.cost, module, load, mode)
        if not again:
            return layer_s, edge_s, np.zeros_like(layer_s)
        longer_s, _ = layer_and_edge_seconds(problem.cost, module, load, mode.recomputing(True))
        return layer_s, edge_s, longer_s - layer_s

    def every() -> UnitSeconds:
        loads = (problem.sample_loads if specs[-1].module == LLM else problem.loads)[module]
        num_buckets = problem.global_batch_size * min(problem.global_batch_size, problem.cluster.num_processes)
        return UnitSeconds(
            seconds(loads.typical(2 ** np.arange(int(nearest_power(num_buckets)) + 1))),
            seconds(problem.heaviest_units(specs)[module]),
            seconds(loads.per_microbatch(np.arange(1, max(1, int(loads.num_units.max())) + 1))),
        )

    return problem.once(("unit seconds", *(spec.module for spec in specs), module, mode), every)


def together_s(
    problem: Problem,
    specs: Sequence[ModuleSpec],
    mode: RunMode,
    num_microbatches: int,
    dp: int,
    average_s: Floats,
    plain_s: Floats,
    message_s: float,
) -> Floats:
    """`[S]`: a step of groups that meet in every microbatch.

    A microbatch takes no less than its longest sample: at best the longest ones of all share the first, and so on.

    Args:
        problem: Batches and costs.
        specs: Of the modules that they hold.
        mode: Tensor-parallel and context-parallel degree.
        num_microbatches: Per step.
        dp: Groups.
        average_s: `[S]`, what an average microbatch takes them to compute.
        plain_s: The same without layers that run again.
        message_s: Of gathers and scatters of a microbatch.
    """
    found = []
    for longest_s, mean_s, without_s in zip(_sample_seconds(problem, specs, mode), average_s, plain_s, strict=True):
        slower = mean_s / without_s if without_s > 0 else 1.0
        firsts_s = slower * longest_s[: num_microbatches * dp : dp]
        rest = num_microbatches - len(firsts_s)
        firsts_s = with_messages(np.maximum(firsts_s, mean_s), message_s)
        found.append(float(firsts_s.sum()) + rest * float(with_messages(mean_s, message_s)))
    return np.array(found)


def _whole_s(problem: Problem, spec: ModuleSpec, load: Floats, mode: RunMode) -> Floats:
    layer_s, edge_s = layer_and_edge_seconds(problem.cost, spec.module, load, mode)
    return spec.num_layers * layer_s + edge_s


def _largest_tile_s(problem: Problem, spec: ModuleSpec, batch: int, mode: RunMode) -> Floats:
    """`[samples]`: of the largest tile or frame of each, which ranks that share a sample cannot cut, on one of them."""
    items, found = problem.batch_items[batch][spec.module], np.zeros(len(problem.batches[batch]))
    tiles = np.stack(items.loads) / np.maximum(items.num_parts, 1)
    of_tiles_s = _whole_s(problem, spec, tiles, RunMode(mode.tp))
    np.maximum.at(found, items.sample_of, of_tiles_s)
    return found


def _sample_seconds(problem: Problem, specs: Sequence[ModuleSpec], mode: RunMode) -> tuple[Floats, ...]:
    """Per batch the seconds of each of its samples in all layers of modules, longest first."""

    def every() -> tuple[Floats, ...]:
        seconds: list[Floats] = [np.zeros(len(batch)) for batch in problem.batches]
        for spec in specs:
            for n, load in enumerate(problem.sample_loads[spec.module].units):
                of_samples_s = _whole_s(problem, spec, load.astype(np.float64), mode)
                if mode.cp > 1 and spec.module != LLM and not spec.merge_tokens:
                    np.maximum(of_samples_s, _largest_tile_s(problem, spec, n, mode), out=of_samples_s)
                seconds[n] += of_samples_s
        return tuple(np.sort(of_batch)[::-1] for of_batch in seconds)

    return problem.once(("sample seconds", *(spec.module for spec in specs), mode), every)
