"""The space the planner searches: per module every (tp, pp, dp) that could run, with its best layer split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflop.cost.model import CostModel
from dflop.errors import InfeasiblePlanError
from dflop.records import ModuleLoad, ModuleSpec, ParallelSpec


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to lay out one module."""

    parallel: ParallelSpec
    layers_per_stage: tuple[int, ...]


def check_processes(modules: Sequence[str], num_processes: int) -> None:
    """Fail fast, before any profiling, when the split layout cannot fit.

    Raises:
        InfeasiblePlanError: fewer processes than modules.
    """
    if len(modules) > num_processes:
        raise InfeasiblePlanError(
            f"{len(modules)} modules in split layout need at least {len(modules)} processes; "
            f"the cluster has {num_processes}",
            where=f"modules: {', '.join(modules)}",
            hint=f"add {len(modules) - num_processes} process(es): num_nodes or num_processes_per_node",
        )


def module_candidates(
    spec: ModuleSpec, cost: CostModel, *, max_processes: int, max_dp: int, typical: ModuleLoad
) -> list[Candidate]:
    """Every layout of `spec` on at most `max_processes` processes, in ascending (tp, pp, dp).

    Args:
        spec: Limits `tp_choices` and `max_pp`; a tp without a cost table is left out.
        cost: Decides the layer split.
        max_processes: Processes left once every other module has one.
        max_dp: Samples of a global batch.
        typical: Load of an average microbatch, at which stages are balanced.

    Raises:
        CostError: no cost table for the module at any tp.
        InfeasiblePlanError: cost tables only at tp degrees the module or the cluster does not allow.
    """
    tables = cost.tps(spec.module)
    found = []
    for tp in sorted(set(spec.tp_choices) & set(tables)):
        layer_s, edge_s = _layer_and_edge_seconds(spec, cost, tp, typical)
        for pp in range(1, min(spec.max_pp, spec.num_layers, max_processes // tp) + 1):
            layers = split_layers(spec.num_layers, pp, layer_s=layer_s, edge_s=edge_s)
            for dp in range(1, min(max_dp, max_processes // (tp * pp)) + 1):
                found.append(Candidate(ParallelSpec(tp, pp, dp), layers))
    if not found:
        raise InfeasiblePlanError(
            f"module `{spec.module}` allows tp {list(spec.tp_choices)}, has cost tables for tp {list(tables)} "
            f"and at most {max_processes} processes",
            hint="profile the module at a smaller tp",
        )
    return found


def split_layers(num_layers: int, pp: int, *, layer_s: float, edge_s: float) -> tuple[int, ...]:
    """Layers per stage, at least one each, so that the slowest stage is fastest when the last also runs the edge.

    Layers are alike, so the depth of the last stage decides and trying every depth is exact. Of equally fast splits
    the most even one wins, and odd layers go to the later of the other stages, which hold fewer microbatches.
    """
    if pp == 1:
        return (num_layers,)

    def slowest_s(last: int) -> tuple[float, int]:
        others = -(-(num_layers - last) // (pp - 1))
        return max(others * layer_s, last * layer_s + edge_s), max(others, last)

    last = min(range(num_layers - pp + 1, 0, -1), key=slowest_s)
    size, extra = divmod(num_layers - last, pp - 1)
    return (*(size + (stage >= pp - 1 - extra) for stage in range(pp - 1)), last)


def _layer_and_edge_seconds(spec: ModuleSpec, cost: CostModel, tp: int, load: ModuleLoad) -> tuple[float, float]:
    args = (spec.module, load.num_items, load.num_tokens, load.sum_sq_tokens)
    layer_s = sum(float(part) for part in cost.module_seconds(*args, num_layers=1, edge=False, tp=tp))
    edge_s = sum(float(part) for part in cost.module_seconds(*args, num_layers=0, edge=True, tp=tp))
    return layer_s, edge_s
