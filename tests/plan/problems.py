"""Small planning problems."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from dflop.cost.model import CostModel
from dflop.plan import uniform
from dflop.plan.space import Problem, SearchSpace
from dflop.records import LLM, CostTerms, LinkCost, Plan, SampleShape
from tests.builders import make_cluster, make_specs, make_table, random_batch


def make_problem(
    *encoders: str, num_processes: int = 4, num_nodes: int = 1, memory_bytes: int = 2**34,
    tps: tuple[int, ...] = (1,), links: Sequence[LinkCost] = (), optimizer_s_per_param: float = 0.0,
    frozen: bool = False, dtype: str = "bfloat16", max_pp: int | None = None,
    batches: Sequence[Sequence[SampleShape]] = (), **space: object,
) -> Problem:  # fmt: skip
    """Modules of four layers, with and without recomputation, on `num_processes` processes of each node.

    Recomputing takes a third more time and keeps a tenth of a layer's activations. `space` are fields of `SearchSpace`.
    """
    specs = tuple(
        dataclasses.replace(s, tp_choices=tps, **({} if max_pp is None else {"max_pp": max_pp}))
        for s in make_specs(*encoders)
    )
    tables = []
    for module in (*encoders, LLM):
        is_frozen = frozen and module != LLM
        for recompute in (False, True):
            kept = CostTerms(0.0, 1e3 if recompute else 1e4, 0.0, 0.0, 1e4, 0.0)
            table = make_table(
                module, dtype=dtype, recompute=recompute, trains="none" if is_frozen else "all", activation_bytes=kept,
                optimizer_s_per_param=0.0 if is_frozen else optimizer_s_per_param,
                table_id=f"{module}-tp1-{recompute}",
            )  # fmt: skip
            if recompute:
                backward = dataclasses.replace(table.backward_s, layer_per_token=3e-5)
                table = dataclasses.replace(table, backward_s=backward)
            tables.append(table)
    cluster = make_cluster(num_processes, memory_bytes=memory_bytes)
    cluster = dataclasses.replace(cluster, num_nodes=num_nodes, num_cores_per_node=num_processes)
    cost = CostModel(tables, specs=specs, links=links, extrapolate=True)
    drawn = tuple(batches) or tuple(random_batch(24, encoders=encoders, seed=seed) for seed in range(2))
    return Problem("run", specs, cluster, cost, drawn, 24, snapshot_seq=3, space=SearchSpace(**space))


def baseline_problem(*encoders: str, **changes: Any) -> Problem:
    """For the planners we compare with: eight processes, tp 1 and 2, up to four stages of every module."""
    return make_problem(*(encoders or ("vision",)), **({"num_processes": 8, "tps": (1, 2), "max_pp": 4} | changes))


def tiles_the_cluster(problem: Problem, plan: Plan) -> bool:
    """Whether every rank belongs to one grid."""
    ranks = [rank for m in plan.pipes for rank in range(m.first_rank, m.first_rank + m.parallel.num_processes)]
    return sorted(ranks) == list(range(problem.cluster.num_processes))


def uniform_plans(problem: Problem) -> list[Plan]:
    """Every uniform plan that fits, in ascending (tp, pp, microbatches)."""
    degrees = uniform._degrees(problem, uniform._common_tps(problem))
    return list(uniform._fitting(problem, uniform._choices(problem, degrees)))
