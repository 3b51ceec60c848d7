"""Megatron-style plans: one (tp, pp, dp) for the whole model, layers cut by count, encoders on the first stage.

Every device is used and data is not looked at. Replicas share out the optimizer's states where that is allowed, for it
saves memory and costs no time; layers recompute where memory asks for it. The LLM is cut where the engine can cut it:
a uniform plan is one that can run here.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop.cost.model import Floats
from dflop.errors import InfeasiblePlanError
from dflop.plan.candidates import Bools, layer_and_edge_seconds, recompute_ways
from dflop.plan.drafts import draft, fits
from dflop.plan.grid_choice import GridChoice
from dflop.plan.memory import stage_bytes
from dflop.plan.partition import even_chain
from dflop.plan.runnable import can_cut
from dflop.plan.space import Problem
from dflop.plan.stage_params import chain_params
from dflop.plan.sync import chain_sync_s
from dflop.records import ParallelSpec, Plan
from dflop.schedule.items import Ints
from dflop.simulate.order import in_flight

PRUNE_RATIO = 2.0
"""Plans with a formula value beyond this many times the best one's are not simulated."""
MIN_SIMULATED = 64
"""Unless there are few: the formula does not see processes that share cores."""


@dataclass(frozen=True, slots=True)
class _Choice:
    parallel: ParallelSpec
    num_microbatches: int
    recompute: bool
    formula_s: float


def tuned_uniform(problem: Problem, step_s: Callable[[Plan], float]) -> Plan | None:
    """The best uniform plan that anyone could find by trying; None where none fits.

    Args:
        problem: What to plan for.
        step_s: Seconds of a step under a plan, simulated with whatever policy the plan is to be judged by; infinite
            where it does not run. Asked of plans within `PRUNE_RATIO` of the best by the planning formula.

    Raises:
        CostError: a module without costs.
        InfeasiblePlanError: a module without any tp that its costs and the cluster allow.
    """
    choices = _choices(problem, _degrees(problem, _common_tps(problem)))
    kept: list[Plan] = []
    for plan in _fitting(problem, sorted(choices, key=lambda c: c.formula_s)):
        if len(kept) >= MIN_SIMULATED and plan.formula_step_s > PRUNE_RATIO * kept[0].formula_step_s:
            break
        kept.append(plan)
    return fastest(kept, step_s)


def fastest(plans: Iterable[Plan], step_s: Callable[[Plan], float]) -> Plan | None:
    """The plan with the least seconds, of equals the first by its id; None where all are infinite or there is none."""
    timed = ((step_s(plan), plan.plan_id, plan) for plan in plans)
    best = min(timed, key=lambda found: found[:2], default=None)
    return None if best is None or best[0] == math.inf else best[2]


def default_plan(problem: Problem) -> Plan:
    """What a recipe gives that nobody tuned: the largest tp, the smallest pp that fits, one sample per microbatch.

    Raises:
        CostError: a module without costs.
        InfeasiblePlanError: no pipeline is deep enough.
    """
    largest_tp = _common_tps(problem)[-1:]
    for parallel in _degrees(problem, largest_tp):
        one_sample_each = problem.global_batch_size // parallel.dp
        for plan in _fitting(problem, _choices(problem, [parallel], [one_sample_each])):
            return plan
    raise InfeasiblePlanError(
        f"no uniform plan with tp {largest_tp} on {problem.cluster.num_processes} processes fits in memory",
        hint="raise memory_per_process_bytes, or add nodes",
    )


def _common_tps(problem: Problem) -> list[int]:
    """Degrees that every module allows and that divide the cluster, ascending."""
    allowed = set.intersection(*(set(problem.tps(spec)) for spec in problem.specs))
    return sorted(tp for tp in allowed if problem.cluster.num_processes % tp == 0)


def _degrees(problem: Problem, tps: Iterable[int]) -> Iterator[ParallelSpec]:
    """Degrees that use every process, with no more replicas than samples, or stages than the LLM's layers."""
    num_processes = problem.cluster.num_processes
    for tp in tps:
        for pp in range(1, min(problem.specs[-1].num_layers, num_processes // tp) + 1):
            dp, rest = divmod(num_processes, tp * pp)
            chain = even_chain(problem.specs, pp)
            can_run = all(can_cut(spec, chain[spec.module]) for spec in problem.specs)
            if rest == 0 and dp <= problem.global_batch_size and can_run:
                yield ParallelSpec(tp, pp, dp)


def _choices(
    problem: Problem, degrees: Iterable[ParallelSpec], counts: Sequence[int] | None = None
) -> Iterator[_Choice]:
    """Degrees x numbers of microbatches (None: all of the space) x ways to recompute, where memory may hold them."""
    for parallel in degrees:
        tried = problem.microbatch_choices if counts is None else counts
        enough = np.array([m for m in tried if parallel.dp * m <= problem.global_batch_size], dtype=np.int64)
        if not len(enough):
            continue
        ways = sorted(set.intersection(*(set(recompute_ways(problem, s.module, parallel.tp)) for s in problem.specs)))
        found = [
            _Choice(parallel, m, way, formula_s)
            for way in ways
            if len(held := enough[_may_fit(problem, parallel, way, enough)])
            for m, formula_s in zip(held.tolist(), _formula_s(problem, parallel, way, held).tolist(), strict=True)
        ]
        yield from sorted(found, key=lambda c: c.num_microbatches)


def _fitting(problem: Problem, choices: Iterable[_Choice]) -> Iterator[Plan]:
    """Choices as plans, those that fit; of two that differ in recomputation alone, the first."""
    done: set[tuple[ParallelSpec, int]] = set()
    for choice in choices:
        key = (choice.parallel, choice.num_microbatches)
        if key in done:
            continue
        layers, shares = even_chain(problem.specs, choice.parallel.pp), _shards(problem, choice.parallel)
        grid = GridChoice.of(choice.parallel, layers, recompute=choice.recompute, shard_optimizer=shares)
        plan = draft(problem, choice.num_microbatches, [grid], choice.formula_s)
        if fits(problem, plan):
            done.add(key)
            yield plan


def _may_fit(problem: Problem, parallel: ParallelSpec, recompute: bool, counts: Ints) -> Bools:
    """`[C]`: whether memory holds the even cut under C numbers of microbatches, as drafts are charged, only at once."""
    if recompute and problem.space.host_bytes:  # a draft may have activations on the host instead
        return np.ones(len(counts), dtype=np.bool_)
    chain = even_chain(problem.specs, parallel.pp)
    parts = [
        stage_bytes(
            spec,
            problem.cost,
            np.array([chain[spec.module]]),
            problem.sample_loads[spec.module].largest(counts * parallel.dp),
            parallel.mode,
            dp=np.array([parallel.dp]),
            recompute=recompute,
            shard_optimizer=np.array([_shards(problem, parallel)]),
        )
        for spec in problem.specs
    ]
    depth = np.array([in_flight(m, np.arange(parallel.pp)[::-1]) for m in counts.tolist()])
    peaks = functools.reduce(operator.add, parts).peaks(depth)
    found: Bools = peaks.max(axis=1) <= problem.usable_bytes
    return found


def _shards(problem: Problem, parallel: ParallelSpec) -> bool:
    return problem.space.shard_optimizer and parallel.dp > 1


def _formula_s(problem: Problem, parallel: ParallelSpec, recompute: bool, counts: Ints) -> Floats:
    """`[C]`: the formula of `dflop/plan/columns.py` for the even cut under C numbers of microbatches."""
    chain = even_chain(problem.specs, parallel.pp)
    layers = np.array([chain[spec.module] for spec in problem.specs])
    params = chain_params(problem.specs, layers[:, np.newaxis], parallel.mode)

    def stage_seconds(loads: Mapping[str, Floats]) -> Floats:
        """`[C, S, P]`, all modules together, of loads `[3, C, S]` per module."""
        total_s: Floats = np.zeros(parallel.pp)
        for spec, own in zip(problem.specs, params, strict=True):
            layer_s, edge_s = layer_and_edge_seconds(
                problem.cost, spec.module, loads[spec.module], parallel.mode.recomputing(recompute)
            )
            total_s = total_s + own.num_layers * layer_s[..., np.newaxis] + own.is_last * edge_s[..., np.newaxis]
        return total_s

    average_s = stage_seconds(
        {name: loads.per_microbatch(counts * parallel.dp) for name, loads in problem.sample_loads.items()}
    )
    heaviest_s = stage_seconds(
        {name: load[:, np.newaxis] for name, load in problem.heaviest_units(problem.specs).items()}
    )
    fill_s = np.maximum(average_s, heaviest_s).sum(axis=2)
    steps_s: Floats = (fill_s + (counts[:, np.newaxis] - 1) * average_s.max(axis=2)).mean(axis=1)
    return steps_s + chain_sync_s(
        problem,
        problem.specs,
        params,
        np.repeat(layers[:, np.newaxis] * recompute, len(counts), axis=1),
        counts,
        parallel.mode,
        dp=np.full(len(counts), parallel.dp),
        shard_optimizer=np.full(len(counts), _shards(problem, parallel)),
        shards=np.ones(len(counts), dtype=np.int64),
    )
