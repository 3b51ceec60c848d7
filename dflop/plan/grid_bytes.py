"""What a plan's grids keep under given loads, and how many tokens of a microbatch their memory holds.

Of the LLM also, above how many tokens how many layers run again in the backward pass. Memory must hold any mix of
microbatches in flight, small ones of which nothing runs again beside large ones of which everything does. So a stage's
memory is divided once: what a layer at work, a loss or a gradient needs on top, of the largest microbatch with all
layers running again, and equal parts for the microbatches in flight. A level's limit is the largest microbatch that
keeps to its part. Every one at work is smaller than that largest one and needs no more on top, so all mixes fit. A
stage with one microbatch in flight has no mixes: a level may fill all of its memory. Encoders are charged with their
own caps at every level, as a microbatch of few tokens of the LLM may have many of theirs.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence

import numpy as np

from dflop.cost.model import Floats
from dflop.plan.candidates import Bools
from dflop.plan.memory import StageBytes, stage_bytes
from dflop.plan.space import Problem
from dflop.records import ModulePlan, Plan
from dflop.schedule.items import Ints
from dflop.simulate.order import in_flight, num_stages_after

MAX_GROWTH = 2.0**40
"""Times what a plan is charged with: a cap this high is none."""
SLACK = 1.6
"""Times the largest microbatch that a plan is charged with: with no room for larger ones the scheduler has no choice
left, and larger ones than this are of no use."""
MEDIA_SLACK = 1.25
"""The same of encoders' loads: memory has to hold them at every level."""


def largest_loads(problem: Problem, plan: Plan, chain: Sequence[ModulePlan]) -> list[Floats]:
    """Per module of a chain `[3]`: the largest microbatch of one group that the plan is charged with."""
    of = [problem.sample_loads if plan.follows_samples(m.module) else problem.loads for m in chain]
    num = plan.num_microbatches
    return [loads[m.module].largest(num * m.parallel.dp) for m, loads in zip(chain, of, strict=True)]


def chain_bytes(
    problem: Problem, plan: Plan, chain: Sequence[ModulePlan], loads: Sequence[Floats], again: Ints | None = None
) -> StageBytes:
    """`[C, pp]`: what stages of modules that share ranks keep, under C loads of each module; their state is one row.

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
                np.array([m.layers_per_stage]),
                columns,
                m.parallel.mode,
                dp=np.array([m.parallel.dp]),
                recompute=own,
                offloaded=np.array([m.offloaded]) if m.offloaded else 0,
                shard_optimizer=np.array([m.shard_optimizer]),
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


def by_tokens(problem: Problem, plan: Plan) -> ModulePlan:
    """The LLM of a plan, `running_again` if memory does not hold all microbatches that may be of use without that."""
    chain, loads = plan.grids[-1], largest_loads(problem, plan, plan.grids[-1])
    none = np.zeros((1, chain[-1].parallel.pp), dtype=np.int64)
    peaks = chain_peaks(problem, plan, chain, [SLACK * x for x in loads], none)
    return running_again(problem, plan, chain) if peaks.max() > problem.usable_bytes else chain[-1]


def running_again(problem: Problem, plan: Plan, chain: Sequence[ModulePlan]) -> ModulePlan:
    """The LLM of a grid, the last of `chain`, with as many layers of every microbatch running again as save memory.

    Where all do, one of them at a time has all of its activations: with few microbatches in flight all but one are
    fewer bytes.
    """
    llm, loads = chain[-1], largest_loads(problem, plan, chain)
    every = np.array(llm.layers_per_stage)
    counts = np.maximum(every - [[0], [1]], 0)
    peaks = chain_peaks(problem, plan, chain, [np.stack([x, x], axis=1) for x in loads], counts)
    limits = tuple((0,) * num for num in np.where(peaks[1] <= peaks[0], counts[1], every).tolist())
    is_any = any(map(len, limits))
    return dataclasses.replace(llm, recompute=is_any, recomputed=(), recompute_tokens=limits if is_any else ())


def with_limits(
    problem: Problem, plan: Plan, chain: Sequence[ModulePlan], largest: Sequence[Floats]
) -> tuple[list[int], ModulePlan]:
    """(token caps, LLM) of a grid with the LLM, of which the largest microbatches fit with all layers running again.

    Args:
        problem: Costs and sizes.
        plan: Number of microbatches and depth.
        chain: Its grid with the LLM, `running_again`.
        largest: Per module of the grid `[3]`, what it is charged with.
    """
    slacks = [MEDIA_SLACK] * (len(chain) - 1) + [SLACK]
    most = [int(slack * x[1]) for slack, x in zip(slacks, largest, strict=True)]
    caps = [min(a or b, b) for a, b in zip(max_tokens(problem, plan, chain, largest), most, strict=True)]
    loads = [scaled(x, cap) for x, cap in zip(largest, caps, strict=True)]
    limits = _limits(problem, plan, chain, loads, largest[-1])
    kept = tuple(tuple(t for t in of_stage if t < caps[-1]) for of_stage in limits)
    return caps, dataclasses.replace(chain[-1], recompute=any(kept), recompute_tokens=kept if any(kept) else ())


def _limits(
    problem: Problem, plan: Plan, chain: Sequence[ModulePlan], loads: Sequence[Floats], largest: Floats
) -> list[list[int]]:
    """Per stage and level the largest tokens of the LLM that memory holds, ascending.

    `loads` are those of the caps, and the LLM's `largest` grows and shrinks in proportion.
    """
    layers = np.array(chain[-1].num_recomputed)
    depth = grid_depth(plan, chain)
    every = chain_bytes(problem, plan, chain, loads)
    spare = (problem.usable_bytes - every.state)[0]
    share = np.floor((spare - every.once[0]) / depth)
    # A row per level of each stage.
    stage = np.repeat(np.arange(len(layers)), layers)
    level = np.concatenate([np.arange(num) for num in layers])
    again, own = np.minimum(level[:, np.newaxis], layers), (np.arange(len(stage)), stage)
    encoders = [chain_bytes(problem, plan, chain[:-1], loads[:-1])] if loads[:-1] else []

    def is_held(tokens: Ints) -> Bools:
        llm = chain_bytes(problem, plan, chain[-1:], [scaled(largest, tokens)], again)
        found = functools.reduce(operator.add, [*encoders, llm])
        alone = found.kept[own] + found.once[own] <= spare[stage]
        return np.asarray(np.where(depth[stage] == 1, alone, found.kept[own] <= share[stage]))

    low, high = np.zeros(len(stage), dtype=np.int64), np.full(len(stage), int(loads[-1][1]))
    while (low < high).any():
        middle = (low + high + 1) // 2
        fine = is_held(middle)
        low, high = np.where(fine, middle, low), np.where(fine, high, middle - 1)
    return [np.maximum.accumulate(low[stage == s]).tolist() for s in range(len(layers))]


def scaled(load: Floats, tokens: Ints | int) -> Floats:
    """`[3]` or `[3, C]`: a load with so many tokens, items and squares in proportion."""
    factor = np.asarray(tokens) / max(float(load[1]), 1.0)
    return np.stack([np.ceil(load[0] * factor), 1.0 * np.asarray(tokens), np.ceil(load[2] * factor)])
