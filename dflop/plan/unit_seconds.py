"""Seconds of a layer and of all that is outside the layers, for chains of every number of microbatches at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop.cost.model import Floats
from dflop.plan.candidates import layer_and_edge_seconds, nearest_power
from dflop.plan.space import Problem
from dflop.records import LLM, ModuleSpec, RunMode


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
    key = (tuple(spec.module for spec in specs), module, mode)
    found: UnitSeconds | None = problem.unit_seconds.get(key)
    if found is None:
        loads = (problem.sample_loads if specs[-1].module == LLM else problem.loads)[module]
        num_buckets = problem.global_batch_size * min(problem.global_batch_size, problem.cluster.num_processes)

        def seconds(load: Floats) -> tuple[Floats, Floats, Floats]:
            layer_s, edge_s = layer_and_edge_seconds(problem.cost, module, load, mode)
            if not again:
                return layer_s, edge_s, np.zeros_like(layer_s)
            longer_s, _ = layer_and_edge_seconds(problem.cost, module, load, mode.recomputing(True))
            return layer_s, edge_s, longer_s - layer_s

        found = problem.unit_seconds[key] = UnitSeconds(
            seconds(loads.typical(2 ** np.arange(int(nearest_power(num_buckets)) + 1))),
            seconds(problem.heaviest_units(specs)[module]),
            seconds(loads.per_microbatch(np.arange(1, max(1, int(loads.num_units.max())) + 1))),
        )
    return found
