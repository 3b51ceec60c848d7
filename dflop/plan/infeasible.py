"""Why no layout fits, in the numbers of the binding limit and with the nearest way out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dflop import units
from dflop.cost.model import CostModel
from dflop.errors import InfeasiblePlanError
from dflop.plan.candidates import Candidate
from dflop.plan.memory import USABLE_MEMORY_FRAC, stage_memory_bytes
from dflop.plan.scenarios import ScenarioLoads
from dflop.records import LLM, ClusterSpec, ModuleSpec


def explain(
    specs: Sequence[ModuleSpec],
    cluster: ClusterSpec,
    cost: CostModel,
    loads: Mapping[str, ScenarioLoads],
    candidates: Mapping[int, Mapping[str, Sequence[Candidate]]],
) -> InfeasiblePlanError:
    """Error for a search that found nothing; `candidates` are those per number of microbatches and module."""
    usable_bytes = USABLE_MEMORY_FRAC * cluster.memory_per_process_bytes
    fewest: dict[str, int] = {}
    for spec in specs:
        needs = [
            (max(peaks), candidate, m)
            for m, by_module in candidates.items()
            for candidate in by_module[spec.module]
            for peaks in [_peaks(spec, candidate, cost, loads[spec.module], m)]
        ]
        if not needs:
            return InfeasiblePlanError(f"module `{spec.module}` has no layout with as many samples as microbatches")
        need_bytes, candidate, m = min(needs, key=lambda n: (n[0], n[1].parallel.num_processes, n[2]))
        if need_bytes > usable_bytes:
            return _memory_error(spec.module, need_bytes, candidate, m, cluster)
        fewest[spec.module] = min(c.parallel.num_processes for bytes_, c, _ in needs if bytes_ <= usable_bytes)
    total = sum(fewest.values())
    if total > cluster.num_processes:
        each = ", ".join(f"{name} {n}" for name, n in fewest.items())
        return InfeasiblePlanError(
            f"the smallest layout that fits in memory needs {total} processes; the cluster has {cluster.num_processes}",
            where=f"processes per module: {each}",
            hint=f"add {total - cluster.num_processes} process(es), or raise memory_per_process_bytes",
        )
    return InfeasiblePlanError(
        f"each module fits in the {units.num_bytes(usable_bytes)} usable per process alone, but no combination does: "
        "encoder activations stay in flight through every LLM stage, and real schedules are uneven",
        where=f"cluster `{cluster.name}`",
        hint="raise memory_per_process_bytes, or allow fewer or more microbatches",
    )


def _peaks(
    spec: ModuleSpec, candidate: Candidate, cost: CostModel, loads: ScenarioLoads, num_microbatches: int
) -> tuple[int, ...]:
    return stage_memory_bytes(
        spec,
        candidate,
        cost,
        loads.largest(num_microbatches * candidate.parallel.dp),
        num_microbatches=num_microbatches,
        num_stages_beyond=0 if spec.module == LLM else 1,
    )


def _memory_error(
    module: str, need_bytes: int, candidate: Candidate, num_microbatches: int, cluster: ClusterSpec
) -> InfeasiblePlanError:
    p = candidate.parallel
    limit_bytes = cluster.memory_per_process_bytes
    fix_bytes = math.ceil(need_bytes / USABLE_MEMORY_FRAC)
    return InfeasiblePlanError(
        f"module `{module}` needs at least {units.num_bytes(need_bytes)} per process of the "
        f"{units.num_bytes(USABLE_MEMORY_FRAC * limit_bytes)} usable ({units.percent(USABLE_MEMORY_FRAC)} of "
        f"{units.num_bytes(limit_bytes)})",
        where=f"its smallest layout: tp {p.tp}, pp {p.pp}, dp {p.dp}, {num_microbatches} microbatches",
        hint=f"set memory_per_process_bytes to {fix_bytes} or more if the device has it; otherwise more processes "
        "(deeper pp), more microbatches, or shorter samples",
    )
