"""Choices made into plans: ranks, memory, token caps, seconds behind the pipeline. Simulated times are left open."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from dflop.cost.model import Floats
from dflop.plan.candidates import recompute_ways
from dflop.plan.grid_choice import GridChoice
from dflop.plan.memory import stage_bytes
from dflop.plan.offload import with_host
from dflop.plan.space import Problem
from dflop.plan.sync import plan_sync_s, with_gathers
from dflop.records import LLM, ClusterSpec, ModulePlan, ParallelSpec, Plan, layout_of, to_dict
from dflop.simulate.order import in_flight, num_stages_after

SLACK = 1.6
"""Times the largest microbatch of an even cut: with no room for larger ones the scheduler has no choice left."""
EIGHTHS = 8
"""Of a stage's layers."""
MAX_COST_GROWTH = 1.0
"""Beyond it cuts hardly move any more."""
MAX_GROWTH = 2.0**40
"""Times what a plan is charged with: a cap this high is none."""


def draft(
    problem: Problem,
    num_microbatches: int,
    grids: Sequence[GridChoice],
    formula_s: float,
    *,
    with_caps: bool = True,
) -> Plan:
    """Plan of grids that hold every module once.

    Args:
        problem: What to plan for.
        num_microbatches: Per step.
        grids: In any order.
        formula_s: Of the planning formula.
        with_caps: Whether token caps are what memory holds, or for now those of the loads it is charged with.
    """
    names = [spec.module for spec in problem.specs]
    ordered = sorted(grids, key=lambda grid: max(map(names.index, grid.layers)))
    placed = zip(ordered, place([grid.parallel for grid in ordered], problem), strict=True)
    modules = {
        name: _module_plan(problem, num_microbatches, name, grid, first_rank)
        for grid, first_rank in placed
        for name in grid.layers
    }
    return _draft(problem, tuple(modules[name] for name in names), num_microbatches, formula_s, with_caps)


def _module_plan(problem: Problem, num_microbatches: int, module: str, grid: GridChoice, first_rank: int) -> ModulePlan:
    again, growth = grid.recomputed[module], 0.0
    if module == LLM:
        recomputed_frac = sum(again) / sum(grid.layers[module])
        growth = cost_growth(problem, num_microbatches, grid.parallel, recomputed_frac)
    return ModulePlan(
        module=module,
        parallel=grid.parallel,
        first_rank=first_rank,
        layers_per_stage=grid.layers[module],
        stage_memory_bytes=(),
        recompute=any(again),
        shard_optimizer=grid.shard_optimizer,
        recomputed=again if any(again) and again != grid.layers[module] else (),
        parameter_shards=grid.parameter_shards,
        cost_growth=growth,
    )


def with_less_recomputed(problem: Problem, plan: Plan) -> Plan | None:
    """A split plan whose stages recompute as few of their first layers as memory asks for, None where that is all.

    In `EIGHTHS`, for microbatches `SLACK` times as large as those that the plan is charged with.
    """

    def recomputing(m: ModulePlan, layers: Sequence[int]) -> ModulePlan:
        return dataclasses.replace(
            m, recompute=any(layers), recomputed=tuple(layers) if any(layers) else (), offloaded=()
        )

    modules = []
    for m in plan.modules:
        again = m.layers_per_stage
        if m.recompute and len(recompute_ways(problem, m.module, m.parallel.tp)) > 1:
            choices = np.array([[-(-n * part // EIGHTHS) for n in again] for part in range(EIGHTHS + 1)])
            load = SLACK * largest_loads(problem, plan, (m,))[0]
            peaks = [chain_peaks(problem, plan, (recomputing(m, of.tolist()),), [load])[0] for of in choices]
            is_held = np.array(peaks) <= problem.usable_bytes
            least = np.where(is_held.any(axis=0), is_held.argmax(axis=0), EIGHTHS)
            again = tuple(choices[least, np.arange(len(again))].tolist())
        modules.append(m if again == m.layers_per_stage else recomputing(m, again))
    if tuple(modules) == plan.modules:
        return None
    found = _draft(problem, tuple(modules), plan.num_microbatches, plan.formula_step_s)
    return found if fits(problem, found) else None


def cost_growth(problem: Problem, num_microbatches: int, parallel: ParallelSpec, recomputed_frac: float) -> float:
    """By how much a token of the LLM costs more for each one before it in its sample, relative to the first.

    At the typical load of a rank, without messages. A token adds twice its place to the squares of its sample. Small
    loads may take as long as twice as many tokens: then each costs its share.
    """
    if parallel.cp == 1:
        return 0.0
    items, tokens, squares = problem.sample_loads[LLM].typical(num_microbatches * parallel.dp) / parallel.cp
    forward_s, backward_s = problem.cost.module_seconds(
        LLM,
        items,
        np.array([tokens, 2 * tokens, tokens]),
        np.array([squares, squares, 2 * squares]),
        num_layers=problem.spec(LLM).num_layers,
        edge=True,
        tp=parallel.tp,
        recompute=recomputed_frac,
    )
    once_s, more_tokens_s, more_squares_s = (forward_s + backward_s).tolist()
    token_s = max(more_tokens_s - once_s, 0.0) or once_s
    found = 2 * (more_squares_s - once_s) / squares * tokens / token_s if token_s > 0 and squares > 0 else 0.0
    return min(max(found, 0.0), MAX_COST_GROWTH)


def fits(problem: Problem, plan: Plan) -> bool:
    """Whether every stage stays within the usable memory."""
    return all(peak <= problem.usable_bytes for m in plan.modules for peak in m.stage_memory_bytes)


def holding(problem: Problem, plan: Plan) -> Plan | None:
    """A plan that was made for other batches, with memory and token caps for those of a problem; None: it has no room.

    Its predicted times stay.
    """
    found = charged(problem, plan)
    return found if fits(problem, found) else None


def charged(problem: Problem, plan: Plan) -> Plan:
    """A plan with memory and token caps for batches and largest samples of a problem, whether it fits or not."""
    return dataclasses.replace(plan, modules=_with_memory(problem, plan, with_caps=True))


def place(parallel: Sequence[ParallelSpec], problem: Problem) -> list[int]:
    """First rank of every grid, one behind the other.

    Encoders come first. Where that would lay a tensor-parallel group across two nodes, grids of a higher tp come first:
    behind them, groups of a lower one begin where they should.
    """
    order: Sequence[int] = range(len(parallel))
    first_ranks = _in_order(order, parallel)
    if any(_crosses_nodes(*placed, problem.cluster) for placed in zip(first_ranks, parallel, strict=True)):
        return _in_order(sorted(order, key=lambda k: -parallel[k].tp), parallel)
    return first_ranks


def _in_order(order: Sequence[int], parallel: Sequence[ParallelSpec]) -> list[int]:
    ends = np.cumsum([parallel[k].num_processes for k in order]).tolist()
    first_ranks = dict(zip(order, [0, *ends], strict=False))
    return [first_ranks[k] for k in range(len(parallel))]


def _crosses_nodes(first_rank: int, parallel: ParallelSpec, cluster: ClusterSpec) -> bool:
    each = cluster.num_processes_per_node
    starts = range(first_rank, first_rank + parallel.num_processes, parallel.group_size)
    return any(start // each != (start + parallel.group_size - 1) // each for start in starts)


def _draft(
    problem: Problem,
    modules: tuple[ModulePlan, ...],
    num_microbatches: int,
    formula_s: float,
    with_caps: bool = True,
) -> Plan:
    """With activations on the host, if that is so meant and what waits for its copy fits, too."""
    llm = with_host(problem, modules[-1], num_microbatches)
    if llm.offloaded:
        plan = _of_modules(problem, (*modules[:-1], llm), num_microbatches, formula_s, with_caps)
        if fits(problem, plan):
            return plan
    return _of_modules(problem, modules, num_microbatches, formula_s, with_caps)


def _of_modules(
    problem: Problem,
    modules: tuple[ModulePlan, ...],
    num_microbatches: int,
    formula_s: float,
    with_caps: bool = True,
) -> Plan:
    tables = [problem.cost.table(m.module, m.parallel.tp, m.recompute).table_id for m in modules]
    layout = layout_of(modules)
    content = {
        "layout": layout,
        "modules": [_content(m) for m in modules],
        "num_microbatches": num_microbatches,
        "global_batch_size": problem.global_batch_size,
        "table_ids": tables,
        "corrections": {
            module: found if isinstance(found, float) else to_dict(found)
            for module, found in problem.cost.corrections.items()
        },
    }
    plan = Plan(
        plan_id=hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16],
        run_id=problem.run_id,
        candidate_rank=-1,
        layout=layout,
        modules=with_gathers(problem, modules),
        num_microbatches=num_microbatches,
        global_batch_size=problem.global_batch_size,
        formula_step_s=formula_s,
        predicted_step_s=math.nan,
        baseline_step_s=math.nan,
        sync_s=plan_sync_s(problem, modules, num_microbatches),
        uniform_step_s=math.nan,
        table_ids=tuple(tables),
        snapshot_seq=problem.snapshot_seq,
        reason="",
    )
    return dataclasses.replace(plan, modules=_with_memory(problem, plan, with_caps=with_caps))


def _content(module: ModulePlan) -> dict[str, Any]:
    """What tells a module's part of a plan from others; of plans without what is newer as it always was."""
    content = to_dict(module)
    if not module.recompute_tokens:
        del content["recompute_tokens"]
    if module.parallel.cp == 1:
        del content["parallel"]["cp"], content["cost_growth"]
    return content


def _with_memory(problem: Problem, plan: Plan, *, with_caps: bool) -> tuple[ModulePlan, ...]:
    """Modules with their memory, and the token caps that it sets or those of the loads that they are charged with."""
    found = []
    for chain in plan.grids:
        largest = largest_loads(problem, plan, chain)
        peaks = chain_peaks(problem, plan, chain, largest)[0].astype(int).tolist()
        caps = [int(x[1]) for x in largest]
        if with_caps and max(peaks) <= problem.usable_bytes:
            caps = max_tokens(problem, plan, chain, largest)
        for m, cap in zip(chain, caps, strict=True):
            told = peaks if m == chain[-1] else [0] * len(peaks)
            found.append(dataclasses.replace(m, stage_memory_bytes=tuple(told), max_tokens=cap))
    return tuple(found)


def largest_loads(problem: Problem, plan: Plan, chain: Sequence[ModulePlan]) -> list[Floats]:
    """Per module of a chain `[3]`: the largest microbatch of one group that the plan is charged with."""
    of = [problem.sample_loads if plan.follows_samples(m.module) else problem.loads for m in chain]
    num = plan.num_microbatches
    return [loads[m.module].largest(num * m.parallel.dp) for m, loads in zip(chain, of, strict=True)]


def chain_peaks(problem: Problem, plan: Plan, chain: Sequence[ModulePlan], loads: Sequence[Floats]) -> Floats:
    """`[C, pp]`: peak bytes of the stages of modules that share ranks, under C loads of each module.

    Args:
        problem: Costs and sizes.
        plan: Number of microbatches; depth of the LLM behind encoders with ranks of their own.
        chain: All modules of an inline plan, or a single one of a split plan.
        loads: Per module `[3]` or `[3, C]`.
    """
    pp = chain[0].parallel.pp
    parts = []
    for m, load in zip(chain, loads, strict=True):
        columns = problem.uneven(m.module, load.reshape(3, -1), m.parallel.cp)
        parts.append(
            stage_bytes(
                problem.spec(m.module),
                problem.cost,
                np.broadcast_to(np.array(m.layers_per_stage), (columns.shape[1], pp)),
                columns,
                tp=m.parallel.tp,
                cp=m.parallel.cp,
                dp=np.full(columns.shape[1], m.parallel.dp),
                recompute=np.array([m.num_recomputed]) if m.recomputed else m.recompute,
                offloaded=np.array([m.offloaded]) if m.offloaded else 0,
                shard_optimizer=np.full(columns.shape[1], m.shard_optimizer),
                shards=m.parameter_shards,
            )
        )
    total = functools.reduce(operator.add, parts)
    after = [num_stages_after(plan, chain[-1].module, stage) for stage in range(pp)]
    return total.peaks(in_flight(plan.num_microbatches, after))


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
