"""Choices made into plans: ranks, memory, token caps, seconds behind the pipeline. Simulated times are left open."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dflop.plan.candidates import recompute_ways
from dflop.plan.grid_bytes import by_tokens, chain_peaks, largest_loads, max_tokens, running_again, with_limits
from dflop.plan.grid_choice import GridChoice
from dflop.plan.offload import with_host
from dflop.plan.space import Problem
from dflop.plan.sync import plan_sync_s, with_gathers
from dflop.records import LLM, ClusterSpec, ModulePlan, ParallelSpec, Plan, RunMode, to_dict

MAX_COST_GROWTH = 1.0
"""Beyond it cuts hardly move any more."""


def draft(
    problem: Problem,
    num_microbatches: int,
    grids: Sequence[GridChoice],
    formula_s: float,
    *,
    with_caps: bool = True,
    per_microbatch: bool = False,
) -> Plan:
    """Plan of grids that hold every module once.

    Args:
        problem: What to plan for.
        num_microbatches: Per step.
        grids: In any order.
        formula_s: Of the planning formula.
        with_caps: Whether token caps are what memory holds, or for now those of the loads it is charged with.
        per_microbatch: Whether the LLM's layers run again where a microbatch's tokens ask for it, if any ever do.
    """
    names = [spec.module for spec in problem.specs]
    ordered = sorted(grids, key=lambda grid: max(map(names.index, grid.layers)))
    placed = zip(ordered, place([grid.parallel for grid in ordered], problem), strict=True)
    by_name = {
        name: _module_plan(problem, num_microbatches, name, grid, first_rank)
        for grid, first_rank in placed
        for name in grid.layers
    }
    modules = tuple(by_name[name] for name in names)
    if per_microbatch and len(recompute_ways(problem, LLM, modules[-1].parallel.tp)) > 1:
        limited = by_tokens(problem, _unfinished(problem, modules, num_microbatches, formula_s))
        if limited.recompute_tokens:
            with_copies = _with_host(problem, modules, num_microbatches, formula_s, with_caps)
            return with_copies or _of_modules(problem, (*modules[:-1], limited), num_microbatches, formula_s, with_caps)
    with_copies = _with_host(problem, modules, num_microbatches, formula_s, with_caps)
    return with_copies or _of_modules(problem, modules, num_microbatches, formula_s, with_caps)


def _module_plan(problem: Problem, num_microbatches: int, module: str, grid: GridChoice, first_rank: int) -> ModulePlan:
    again = grid.recomputed[module]
    growth = cost_growth(problem, num_microbatches, grid.parallel, sum(again) / sum(grid.layers[module]), module)
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
        merge_tokens=problem.spec(module).merge_tokens if grid.parallel.cp > 1 else 0,
    )


def cost_growth(
    problem: Problem, num_microbatches: int, parallel: ParallelSpec, recomputed_frac: float, module: str = LLM
) -> float:
    """By how much a token costs more for each one before it in its sample or tile, relative to the first.

    At the typical load of a rank, without messages. A token adds twice its place to the squares of its sample. Small
    loads may take as long as twice as many tokens: then each costs its share.
    """
    if parallel.cp == 1:
        return 0.0
    items, tokens, squares = problem.sample_loads[module].typical(num_microbatches * parallel.dp) / parallel.cp
    forward_s, backward_s = problem.cost.module_seconds(
        module,
        (items, np.array([tokens, 2 * tokens, tokens]), np.array([squares, squares, 2 * squares])),
        RunMode(parallel.tp, recompute=recomputed_frac),
        num_layers=problem.spec(module).num_layers,
        edge=True,
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
    together = max(parallel.group_size, parallel.ep)
    starts = range(first_rank, first_rank + parallel.num_processes, together)
    return any(start // each != (start + together - 1) // each for start in starts)


def _with_host(
    problem: Problem, modules: tuple[ModulePlan, ...], num_microbatches: int, formula_s: float, with_caps: bool
) -> Plan | None:
    """With activations on the host, if that is so meant and what waits for its copy fits, too."""
    llm = with_host(problem, modules[-1], num_microbatches)
    if not llm.offloaded:
        return None
    plan = _of_modules(problem, (*modules[:-1], llm), num_microbatches, formula_s, with_caps)
    return plan if fits(problem, plan) else None


def _of_modules(
    problem: Problem, modules: tuple[ModulePlan, ...], num_microbatches: int, formula_s: float, with_caps: bool
) -> Plan:
    plan = _unfinished(problem, modules, num_microbatches, formula_s)
    content = {
        "layout": _layout(plan),
        "modules": [_content(m) for m in modules],
        "num_microbatches": num_microbatches,
        "global_batch_size": problem.global_batch_size,
        "table_ids": [problem.cost.table(m.module, m.modes[-1]).table_id for m in modules],
        "corrections": {
            module: found if isinstance(found, float) else to_dict(found)
            for module, found in problem.cost.corrections.items()
        },
    }
    plan = dataclasses.replace(
        plan,
        plan_id=hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16],
        modules=with_gathers(problem, modules),
        sync_s=plan_sync_s(problem, modules, num_microbatches),
    )
    return dataclasses.replace(plan, modules=_with_memory(problem, plan, with_caps=with_caps))


def _unfinished(problem: Problem, modules: tuple[ModulePlan, ...], num_microbatches: int, formula_s: float) -> Plan:
    """Without its id, memory and messages."""
    return Plan(
        plan_id="",
        run_id=problem.run_id,
        candidate_rank=-1,
        modules=modules,
        num_microbatches=num_microbatches,
        global_batch_size=problem.global_batch_size,
        formula_step_s=formula_s,
        predicted_step_s=math.nan,
        baseline_step_s=math.nan,
        sync_s=math.nan,
        uniform_step_s=math.nan,
        table_ids=tuple(problem.cost.table(m.module, mode).table_id for m in modules for mode in m.modes),
        snapshot_seq=problem.snapshot_seq,
        reason="",
    )


def _layout(plan: Plan) -> str:
    """The word for it in what a plan's id is made of."""
    num_grids = len(plan.grids)
    return "inline" if num_grids == 1 else "split" if num_grids == len(plan.modules) else "mixed"


def _content(module: ModulePlan) -> dict[str, Any]:
    """What tells a module's part of a plan from others; of plans without what is newer as it always was."""
    content = to_dict(module)
    if not module.recompute_tokens:
        del content["recompute_tokens"]
    if module.parallel.cp == 1:
        del content["parallel"]["cp"], content["cost_growth"]
    if not module.merge_tokens:
        del content["merge_tokens"]
    if module.parallel.ep == 1:
        del content["parallel"]["ep"]
    return content


def _with_memory(problem: Problem, plan: Plan, *, with_caps: bool) -> tuple[ModulePlan, ...]:
    """Modules with their memory, and the token caps that it sets or those of the loads that they are charged with."""
    found: list[ModulePlan] = []
    for grid in plan.grids:
        chain, limited = grid, bool(grid[-1].recompute_tokens)
        if limited:
            chain = (*grid[:-1], running_again(problem, plan, grid))
        largest = largest_loads(problem, plan, chain)
        peaks = chain_peaks(problem, plan, chain, largest)
        caps = [int(x[1]) for x in largest]
        if with_caps and peaks.max() <= problem.usable_bytes:
            if limited:
                caps, llm = with_limits(problem, plan, chain, largest)
                chain = (*chain[:-1], llm)
                again = [llm.num_rerun(stage, largest[-1][1]) for stage in range(llm.parallel.pp)]
                peaks = chain_peaks(problem, plan, chain, largest, np.array([again]))
            else:
                caps = max_tokens(problem, plan, chain, largest)
        of_stages = tuple(peaks[0].astype(int).tolist())
        for m, cap in zip(chain, caps, strict=True):
            told = of_stages if m is chain[-1] else (0,) * len(of_stages)
            found.append(dataclasses.replace(m, stage_memory_bytes=told, max_tokens=cap))
    return tuple(sorted(found, key=lambda m: [of.module for of in plan.modules].index(m.module)))
