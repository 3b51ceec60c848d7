"""Megatron-style plans: one (tp, pp, dp) for the whole model, layers cut by count, encoders in the first stages.

What is common to all of them: every device is used, data is not looked at, and replicas share out the optimizer's
states where that is allowed, for it saves memory and costs no time. Layers recompute only where memory asks for it.
Unlike our engine, the trainers that run such plans cut encoders anywhere: `ModuleSpec.max_pp` does not bind here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from dflop.errors import InfeasiblePlanError
from dflop.plan.baselines.layers import even_chain
from dflop.plan.candidates import recompute_ways
from dflop.plan.drafts import fits, inline_draft
from dflop.plan.space import Problem
from dflop.records import ParallelSpec, Plan


def uniform_plans(problem: Problem) -> list[Plan]:
    """Every uniform plan that fits, for every number of microbatches, in ascending (tp, pp, microbatches).

    Raises:
        CostError: a module without costs.
        InfeasiblePlanError: a module without any tp that its costs and the cluster allow.
    """
    return [
        plan
        for parallel in _degrees(problem, _common_tps(problem))
        for m in problem.microbatch_choices
        if parallel.dp * m <= problem.global_batch_size
        for plan in _fitting(problem, parallel, m)
    ]


def default_plan(problem: Problem) -> Plan:
    """What a recipe gives that nobody tuned: the largest tp, the smallest pp that fits, one sample per microbatch.

    Raises:
        CostError: a module without costs.
        InfeasiblePlanError: no pipeline is deep enough.
    """
    tps = _common_tps(problem)
    for parallel in _degrees(problem, tps[-1:]):
        for plan in _fitting(problem, parallel, problem.global_batch_size // parallel.dp):
            return plan
    raise InfeasiblePlanError(
        f"no uniform plan with tp {tps[-1:]} on {problem.cluster.num_processes} processes fits in memory",
        hint="raise memory_per_process_bytes, or add nodes",
    )


def default_plans(problem: Problem) -> list[Plan]:
    """`default_plan`, then its layout under every other number of microbatches that fits.

    Raises:
        CostError: a module without costs.
        InfeasiblePlanError: no pipeline is deep enough.
    """
    first = default_plan(problem)
    parallel = first.modules[-1].parallel
    others = [m for m in problem.microbatch_choices if parallel.dp * m <= problem.global_batch_size]
    return [first] + [plan for m in others if m != first.num_microbatches for plan in _fitting(problem, parallel, m)]


def _common_tps(problem: Problem) -> list[int]:
    """Degrees that every module allows and that divide the cluster, ascending."""
    allowed = set.intersection(*(set(problem.tps(spec)) for spec in problem.specs))
    return sorted(tp for tp in allowed if problem.cluster.num_processes % tp == 0)


def _degrees(problem: Problem, tps: Iterable[int]) -> Iterator[ParallelSpec]:
    """Degrees that use every process, with no more stages than layers nor replicas than samples; pp ascending."""
    num_processes = problem.cluster.num_processes
    num_layers = sum(spec.num_layers for spec in problem.specs)
    for tp in tps:
        for pp in range(1, min(num_layers, num_processes // tp) + 1):
            dp, rest = divmod(num_processes, tp * pp)
            if rest == 0 and dp <= problem.global_batch_size:
                yield ParallelSpec(tp, pp, dp)


def _fitting(problem: Problem, parallel: ParallelSpec, num_microbatches: int) -> Iterator[Plan]:
    """At most one plan: without recomputation if that fits, else with it."""
    ways = set.intersection(*(set(recompute_ways(problem, s.module, parallel.tp)) for s in problem.specs))
    for recompute in sorted(ways):
        plan = inline_draft(
            problem,
            num_microbatches,
            parallel,
            even_chain(problem.specs, parallel.pp),
            recompute=recompute,
            shard_optimizer=problem.space.shard_optimizer and parallel.dp > 1,
            formula_s=math.nan,
        )
        if fits(problem, plan):
            yield plan
            return
