"""How fast a step could be at best under a cost model: what no plan and no schedule can be faster than."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflop.plan.space import Problem
from dflop.records import ModuleSpec, Plan, SampleShape
from dflop.schedule.items import module_items


def bound_s(problem: Problem, batch: Sequence[SampleShape]) -> float:
    """Seconds of one step when every GPU is busy with useful work from beginning to end.

    The GPU-seconds of every module at the tp that costs least of them, added up and divided over all GPUs. Left out are
    fill and drain of pipelines, uneven microbatches, fixed costs of a microbatch, messages, recomputation, gradient
    synchronisation, the optimizer, and that memory may forbid the cheapest tp. So it is a true lower bound where costs
    are lines, and no plan of a large model reaches it.
    """
    return sum(
        min(module_gpu_seconds(problem, spec, batch, tp) for tp in problem.tps(spec)) for spec in problem.specs
    ) / problem.cluster.num_processes  # fmt: skip


def bound_of_plan_s(problem: Problem, plan: Plan, batch: Sequence[SampleShape]) -> float:
    """The same at the tp and the recomputation that a plan chose: what of its distance they explain."""
    placed: Mapping[str, tuple[int, bool]] = {m.module: (m.parallel.tp, m.recompute) for m in plan.modules}
    return sum(
        module_gpu_seconds(problem, spec, batch, *placed[spec.module]) for spec in problem.specs
    ) / problem.cluster.num_processes  # fmt: skip


def module_gpu_seconds(
    problem: Problem, spec: ModuleSpec, batch: Sequence[SampleShape], tp: int, recompute: bool = False
) -> float:
    """GPU-seconds of all of a batch's items in one module, without fixed costs."""
    items = module_items(batch, spec.module)
    seconds = problem.cost.item_seconds(
        spec.module,
        *(float(part.sum()) for part in items.loads),
        num_layers=spec.num_layers,
        edge=True,
        tp=tp,
        recompute=recompute,
        factor=problem.cost.level(spec.module),
    )
    return tp * float(seconds)
