"""What a profile would do, without doing it: which probes, and how long where cost tables are at hand.

Tables may be analytic or those of an earlier profile. The profile's own loop runs over its own groups, with seconds
that the tables predict. They also say, roughly, which groups do not fit into a device's memory: weights, gradients and
what the backward pass needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflop.cost.curve import evaluate
from dflop.models.family import Family
from dflop.models.ways import TRAIN, Way
from dflop.profile.groups import load_on, probe_groups, used_modules
from dflop.profile.sweeps import sweep
from dflop.records import TRAINS_ALL, TRAINS_NONE, CostTable, CostTerms, ModuleLoad, SampleShape


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
    """Seconds of all repeats and warm-ups, forward and backward; None where no table says."""


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
    probed = (t for t in tables if t.trains in (TRAINS_ALL, TRAINS_NONE))
    known = {(t.module, t.tp, t.is_frozen, t.recompute): t for t in probed}
    used = used_modules(family, shapes)
    share_s = budget_s / (len(used) * len(ways))
    planned: list[PlannedProbe] = []
    for module in (spec.module for spec in used):
        groups = probe_groups(shapes, module, num_groups=num_probes, max_samples=max_samples, seed=seed)
        deep = family.probe_depths(module, depths)
        shallow = [family.cut_to(module, n) for n in deep]
        for way in ways:
            table = known.get((module, tp, way.is_frozen, way.recompute))
            probes = [
                [
                    PlannedProbe(module, way, tp, n, g.kind, len(g.samples), load_on(cut, module, g), None)
                    for n, cut in zip(deep, shallow, strict=True)
                ]
                for g in groups
            ]
            sizes = [g.load.num_tokens for g in groups]
            planned += _swept(probes, sizes, share_s, num_repeats, table, memory_bytes)
    return planned


def _swept(
    probes: Sequence[Sequence[PlannedProbe]], sizes: Sequence[int], share_s: float, num_repeats: int,
    table: CostTable | None, memory_bytes: int | None,
) -> list[PlannedProbe]:  # fmt: skip
    """Probes that would be taken of one module in one way, given those of every group and the groups' tokens."""
    num_runs: dict[int, int] = {}

    def visit(index: int, num_timed: int) -> float | None:
        if table and memory_bytes and any(_bytes(table, p) > memory_bytes for p in probes[index]):
            return None
        if num_timed:
            num_runs[index] = num_runs.get(index, 0) + 1 + num_timed
        return (1 + num_timed) * sum(_seconds(table, p) for p in probes[index]) if table else 0.0

    sweep(sizes, share_s, num_repeats, visit)
    return [
        replace(p, seconds=runs * _seconds(table, p) if table else None)
        for index, runs in num_runs.items()
        for p in probes[index]
    ]


def _bytes(table: CostTable, probe: PlannedProbe) -> float:
    """Weights, their gradients and activations."""
    weights = probe.num_layers * table.layer_param_bytes + table.edge_param_bytes
    return (1 if probe.way.is_frozen else 2) * weights + _cost(table.activation_bytes, probe)


def _seconds(table: CostTable, probe: PlannedProbe) -> float:
    """Seconds of one run, forward and backward."""
    return _cost(table.forward_s, probe) + _cost(table.backward_s, probe)


def _cost(terms: CostTerms, probe: PlannedProbe) -> float:
    load = (probe.load.num_items, probe.load.num_tokens, probe.load.sum_sq_tokens)
    return float(evaluate(terms, load, probe.num_layers, True))
