"""What a plan's grids keep under given loads, and how many tokens of a microbatch their memory holds."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import numpy as np

from dflop.cost.model import Floats
from dflop.plan.memory import StageBytes, stage_bytes
from dflop.plan.space import Problem
from dflop.records import ModulePlan, Plan
from dflop.schedule.items import Ints
from dflop.simulate.order import in_flight, num_stages_after

MAX_GROWTH = 2.0**40
"""Times what a plan is charged with: a cap this high is none."""


def largest_loads(problem: Problem, plan: Plan, chain: Sequence[ModulePlan]) -> list[Floats]:
    """Per module of a chain `[3]`: the largest microbatch of one group that the plan is charged with."""
    of = [problem.sample_loads if plan.follows_samples(m.module) else problem.loads for m in chain]
    num = plan.num_microbatches
    return [loads[m.module].largest(num * m.parallel.dp) for m, loads in zip(chain, of, strict=True)]


def chain_bytes(
    problem: Problem, plan: Plan, chain: Sequence[ModulePlan], loads: Sequence[Floats], again: Ints | None = None
) -> StageBytes:
    """`[C, pp]`: what stages of modules that share ranks keep, under C loads of each module.

    Args:
        problem: Costs and sizes.
        plan: Number of microbatches; depth of the LLM behind encoders with ranks of their own.
        chain: Modules of a grid.
        loads: Per module `[3]` or `[3, C]`.
        again: `[C, pp]` layers of the last module that run again; None: as the plan has it, at most.
    """
    parts = []
    for m, load in zip(chain, loads, strict=True):
        columns = problem.uneven(m.module, load.reshape(3, -1), m.parallel.cp)
        own: bool | Ints = np.array([m.num_recomputed]) if m.recomputed or m.recompute_tokens else m.recompute
        if again is not None and m is chain[-1]:
            own = again
        parts.append(
            stage_bytes(
                problem.spec(m.module),
                problem.cost,
                np.broadcast_to(np.array(m.layers_per_stage), (columns.shape[1], m.parallel.pp)),
                columns,
                m.parallel.mode,
                dp=np.full(columns.shape[1], m.parallel.dp),
                recompute=own,
                offloaded=np.array([m.offloaded]) if m.offloaded else 0,
                shard_optimizer=np.full(columns.shape[1], m.shard_optimizer),
                shards=m.parameter_shards,
            )
        )
    return functools.reduce(operator.add, parts)


def grid_depth(plan: Plan, chain: Sequence[ModulePlan]) -> Ints:
    """`[pp]`: microbatches in flight on the stages of a grid."""
    after = [num_stages_after(plan, chain[-1].module, stage) for stage in range(chain[-1].parallel.pp)]
    return in_flight(plan.num_microbatches, after)


def chain_peaks(
    problem: Problem, plan: Plan, chain: Sequence[ModulePlan], loads: Sequence[Floats], again: Ints | None = None
) -> Floats:
    """`[C, pp]`: peak bytes of the stages of modules that share ranks, as of `chain_bytes`."""
    return chain_bytes(problem, plan, chain, loads, again).peaks(grid_depth(plan, chain))


def max_tokens(problem: Problem, plan: Plan, chain: Sequence[ModulePlan], largest: Sequence[Floats]) -> list[int]:
    """Per module of a chain: tokens that a microbatch of a group may have, all modules together, and still fit.

    The loads the plan is charged with grow in proportion, squares and items like tokens. 0 where memory sets no cap;
    where even those loads do not fit, their own tokens.
    """
    low, high = 1.0, MAX_GROWTH
    for _ in range(2):  # 40 doublings in 512 steps, twice: to one part in ten thousand
        factors = np.geomspace(low, high, 513)
        peaks = chain_peaks(problem, plan, chain, [np.outer(x, factors) for x in largest])
        is_over = (peaks > problem.usable_bytes).any(axis=1)
        if not is_over.any():
            return [0] * len(chain)
        first_over = int(np.argmax(is_over))
        low, high = float(factors[max(first_over - 1, 0)]), float(factors[first_over])
        if first_over == 0:
            break
    return [int(low * x[1]) for x in largest]
