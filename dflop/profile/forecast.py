"""What a profile would do, without doing it: which probes, and how long where cost tables are at hand.

Tables may be analytic or those of an earlier profile. The groups of an adaptive profile depend on what it measures;
those listed are as many, of the same kinds, in the order of a profile that does not choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflop.cost.curve import evaluate
from dflop.models import load_family
from dflop.models.family import Family
from dflop.models.ways import TRAIN, Way
from dflop.profile.groups import load_on, probe_groups
from dflop.profile.run import MIN_GROUPS, num_runs, used_modules
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
        tables: Costs where known; a module, way or tp without one is planned with unknown seconds.

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
            table, spent_s = known.get((module, tp, way.is_frozen, way.recompute)), 0.0
            for num_done, group in enumerate(groups):
                if num_done >= MIN_GROUPS and spent_s > share_s:
                    break
                for num_layers, cut in zip(depths, shallow, strict=True):
                    load = load_on(cut, module, group)
                    seconds = None if table is None else num_runs(num_repeats) * _seconds(table, load, num_layers)
                    spent_s += seconds or 0.0
                    planned.append(
                        PlannedProbe(module, way, tp, num_layers, group.kind, len(group.samples), load, seconds)
                    )
    return planned


def _seconds(table: CostTable, load: ModuleLoad, num_layers: int) -> float:
    parts = (load.num_items, load.num_tokens, load.sum_sq_tokens)
    phases = (table.forward_s, table.backward_s)
    return sum(float(evaluate(terms, parts, num_layers, True)) for terms in phases)
