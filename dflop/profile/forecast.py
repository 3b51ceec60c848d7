"""What a profile would do, without doing it: which probes, and how long where cost tables are at hand.

Tables may be analytic or those of an earlier profile. Groups are those of the profile, in its order, and keep to the
budget by the same rule. Tables also say, roughly, which groups do not fit into a device's memory: weights,
gradients and what the backward pass needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflop.cost.curve import evaluate
from dflop.models import load_family
from dflop.models.family import Family
from dflop.models.ways import TRAIN, Way
from dflop.profile.groups import ProbeGroup, load_on, probe_groups
from dflop.profile.profiler import next_group, num_runs, used_modules
from dflop.records import CostTable, ModuleLoad, SampleShape


@dataclass(frozen=True, slots=True)
class PlannedProbe:
    """One probe that would be taken."""

    module: str
    way: Way
    tp: int
    num_layers: int
    group: str
    """Kind of the group, as in `Measurement`."""
    num_samples: int
    load: ModuleLoad
    seconds: float | None
    """Of all its repeats and the warm-ups, forward and backward; None where no table says."""


def plan_probes(
    family: Family,
    shapes: Sequence[SampleShape],
    *,
    depths: Sequence[int],
    num_probes: int,
    max_samples: int,
    num_repeats: int,
    budget_s: float,
    seed: int,
    ways: Sequence[Way] = (TRAIN,),
    tp: int = 1,
    tables: Sequence[CostTable] = (),
    memory_bytes: int | None = None,
) -> list[PlannedProbe]:
    """Probes in the order they would be taken, as many as the budget allows by the tables; nothing is built.

    Args:
        family: Model family at full size.
        shapes: Sampled data distribution.
        depths: Shallow depths to build.
        num_probes: Groups per module and way, at most.
        max_samples: Largest group in samples.
        num_repeats: Timed runs per probe.
        budget_s: Time for the probes of all modules and ways together.
        seed: Fixes the groups.
        ways: How every module is run.
        tp: Tensor-parallel ranks that probe together.
        tables: Costs where known; a module, way or tp without one is planned with unknown seconds, for any memory.
        memory_bytes: Of a device; None: any group fits.

    Raises:
        DataError: there is no sample to draw groups from.
    """
    known = {(t.module, t.tp, t.is_frozen, t.recompute): t for t in tables}
    used = used_modules(family, shapes)
    share_s = budget_s / (len(used) * len(ways))
    planned: list[PlannedProbe] = []
    for module in used:
        groups = probe_groups(shapes, module, num_groups=num_probes, max_samples=max_samples, seed=seed)
        shallow = [load_family(family.name, family.shallow(module, n), family.media) for n in depths]
        for way in ways:
            table = known.get((module, tp, way.is_frozen, way.recompute))
            probes = [
                [
                    _planned(table, module, way, tp, n, group, load_on(cut, module, group), num_runs(num_repeats))
                    for n, cut in zip(depths, shallow, strict=True)
                ]
                for group in groups
            ]
            if table is not None and memory_bytes is not None:
                probes = [of for of in probes if all(_bytes(table, p) <= memory_bytes for p in of)]
            planned += [p for of in _within(probes, share_s) for p in of]
    return planned


def _within(groups: Sequence[Sequence[PlannedProbe]], share_s: float) -> list[Sequence[PlannedProbe]]:
    """The groups that a profile takes in this time, in order; unknown seconds count as none."""
    left, taken, spent_s = list(groups), list[Sequence[PlannedProbe]](), 0.0
    while left:
        seconds = [sum(p.seconds or 0.0 for p in group) for group in left]
        sizes, done = ([group[0].load.num_tokens for group in some] for some in (left, taken))
        index = next_group(seconds, sizes, done, share_s - spent_s)
        if index is None:
            break
        spent_s += seconds[index]
        taken.append(left.pop(index))
    return taken


def _planned(
    table: CostTable | None, module: str, way: Way, tp: int, num_layers: int, group: ProbeGroup, load: ModuleLoad,
    num_runs: int,
) -> PlannedProbe:  # fmt: skip
    seconds = None if table is None else num_runs * _seconds(table, load, num_layers)
    return PlannedProbe(module, way, tp, num_layers, group.kind, len(group.samples), load, seconds)


def _bytes(table: CostTable, probe: PlannedProbe) -> float:
    """Weights, their gradients and activations."""
    weights = probe.num_layers * table.layer_param_bytes + table.edge_param_bytes
    load = (probe.load.num_items, probe.load.num_tokens, probe.load.sum_sq_tokens)
    kept = float(evaluate(table.activation_bytes, load, probe.num_layers, True))
    return (1 if probe.way.is_frozen else 2) * weights + kept


def _seconds(table: CostTable, load: ModuleLoad, num_layers: int) -> float:
    parts = (load.num_items, load.num_tokens, load.sum_sq_tokens)
    phases = (table.forward_s, table.backward_s)
    return sum(float(evaluate(terms, parts, num_layers, True)) for terms in phases)
