"""Why nothing fits, in numbers: the module that lacks memory, how much, and every single change that would help.

Nothing here is a rule of thumb: each change is made to the problem, and the search for a plan is asked again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from dflop import units
from dflop.errors import InfeasiblePlanError
from dflop.plan.candidates import far_apart
from dflop.plan.columns import Columns
from dflop.plan.drafts import draft
from dflop.plan.grid_bytes import chain_peaks, largest_loads
from dflop.plan.grid_search import grids_apart, grids_with_llm, whole_depths
from dflop.plan.program import optimum
from dflop.plan.space import Problem, SearchSpace
from dflop.records import ModulePlan, Plan

MAX_MEMORY_GROWTH = 2**12
"""Times a device's memory; no plan that needs more is worth telling of."""
MAX_GROWTH = 4
"""Times the processes there are, as an advice."""
TOLERANCE = 1.01
"""Precision of the least memory that would do."""
COARSE = 1.5
"""Numbers of microbatches nearer to each other than this need hardly different memory."""


def explain(problem: Problem) -> InfeasiblePlanError:
    """Error for a search that found nothing."""
    if find_draft(problem) is not None:
        return InfeasiblePlanError(
            "layouts fit by their expected largest microbatches, but no schedule of the sampled batches stays within "
            "those",
            where=f"cluster `{problem.cluster.name}`",
            hint="allow more microbatches, recomputation or more memory",
        )
    limit_bytes = problem.cluster.memory_per_process_bytes
    memory_bytes = _least(limit_bytes, MAX_MEMORY_GROWTH * limit_bytes, lambda n: _with_memory(problem, n), TOLERANCE)
    if memory_bytes is None:
        return _no_memory_would_do(problem)
    nearest = find_draft(_with_memory(problem, memory_bytes))
    assert nearest is not None, f"{memory_bytes} bytes fit before"
    module, stage, need_bytes = _fullest(problem, nearest)
    p, usable_bytes = module.parallel, problem.usable_bytes
    grid = "+".join(m.module for m in nearest.grid_of(module.module))
    options = [*_fixes(problem), f"memory_per_process_bytes {memory_bytes}"]
    return InfeasiblePlanError(
        f"module `{module.module}` needs {units.num_bytes(need_bytes - usable_bytes)} more per rank: at least "
        f"{units.num_bytes(need_bytes)} of the {units.num_bytes(usable_bytes)} usable "
        f"({units.percent(usable_bytes / limit_bytes)} of {units.num_bytes(limit_bytes)})",
        where=(
            f"stage {stage} of the plan that needs the least memory: {grid}, tp {p.tp}, "
            f"{f'cp {p.cp}, ' * (p.cp > 1)}{f'ep {p.ep}, ' * (p.ep > 1)}pp {p.pp}, dp {p.dp}, "
            f"{nearest.num_microbatches} microbatches"
        ),
        hint=f"any of these makes it fit: {', or '.join(options)}",
    )


def find_draft(problem: Problem) -> Plan | None:
    """A plan that fits, not the best one; None when there is none."""
    names, num_processes = [spec.module for spec in problem.specs], problem.cluster.num_processes
    # Many microbatches first, for they need the least memory.
    for m in far_apart(problem.microbatch_choices[::-1], COARSE):
        for grids in grids_with_llm(whole_depths(problem, m), 1):
            return draft(problem, m, [grids.choice(0)], float(grids.alone_s[0]), with_caps=False)
        columns = Columns.of(names, m, num_processes, grids_apart(problem, m, math.inf))
        found = optimum(columns, m, math.inf, 1).found
        if columns is not None and found:
            value_s, cover = found[0]
            return draft(problem, m, columns.choices(cover), value_s)
    return None


def _fixes(problem: Problem) -> Iterator[str]:
    """Every single change that makes a plan fit, the cheap ones first."""
    space, batch = problem.space, problem.global_batch_size
    if True not in space.recompute and _fits(problem, recompute=(False, True)):
        yield "recomputation"
    if not space.shard_optimizer and _fits(problem, shard_optimizer=True):
        yield "optimizer state sharded over replicas (ZeRO-1)"
    if True not in space.shard_parameters and _fits(problem, shard_parameters=(False, True)):
        yield "parameters sharded over replicas (FSDP2)"
    for cp in _more_cps(problem):
        if _fits(problem, cps=(cp,)):
            yield f"plan.context_parallel: [{cp}]"
            break
    for shared in SearchSpace().share_ranks:
        if shared not in space.share_ranks and _fits(problem, share_ranks=(shared,)):
            yield f"plan.share_ranks: [{str(shared).lower()}]"
    counts = problem.microbatch_choices
    for m in SearchSpace().microbatch_choices(batch):
        if m > counts[-1] and _fits(problem, microbatches=(m,)):
            yield f"{m} microbatches"
            break
    if (text := _more_processes(problem)) is not None:
        yield text


def _more_cps(problem: Problem) -> list[int]:
    """Context-parallel degrees that the space leaves out, powers of two within a node, the smallest first."""
    if problem.space.whole_samples:
        return []
    powers = [1 << k for k in range(problem.cluster.num_processes_per_node.bit_length())]
    allowed = {cp for spec in problem.specs for tp in problem.tps(spec) for cp in problem.cps(tp)}
    return [cp for cp in powers if cp not in allowed]


def _more_processes(problem: Problem) -> str | None:
    """The fewest nodes more that do; on a cluster of one machine that starts processes itself, processes."""
    cluster = problem.cluster
    unit, key = ("node", "num_nodes") if cluster.backend == "slurm" else ("process", "num_processes_per_node")
    have = int(getattr(cluster, key))

    def with_more(num: int) -> Problem:
        change: dict[str, Any] = {key: num}
        return dataclasses.replace(problem, cluster=dataclasses.replace(cluster, **change))

    needed = _least(have, MAX_GROWTH * have, with_more)
    if needed is None:
        return None
    more = needed - have
    plural = "" if more == 1 else "es" if unit == "process" else "s"
    return f"{more} more {unit}{plural} ({key} {needed})"


def _fits(problem: Problem, **space: Any) -> bool:
    changed = dataclasses.replace(problem.space, **space)
    return find_draft(dataclasses.replace(problem, space=changed)) is not None


def _with_memory(problem: Problem, num_bytes: int) -> Problem:
    return dataclasses.replace(
        problem, cluster=dataclasses.replace(problem.cluster, memory_per_process_bytes=num_bytes)
    )


def _least(too_few: int, most: int, change: Callable[[int], Problem], tolerance: float = 1.0) -> int | None:
    """Least number up to `most` under which something fits, to a factor of `tolerance`; None where none does.

    It is enclosed by doubling and then by halving, so more must never be worse.
    """
    low, high = too_few, 2 * too_few
    while find_draft(change(high)) is None:
        low, high = high, 2 * high
        if high > most:
            return None
    while high - low > 1 and high > low * tolerance:
        middle = (low + high) // 2
        if find_draft(change(middle)) is None:
            low = middle
        else:
            high = middle
    return high


def _fullest(problem: Problem, plan: Plan) -> tuple[ModulePlan, int, int]:
    """(module, stage, bytes) where a plan needs most; of modules on one stage the one that needs most there."""
    holder = max(plan.modules, key=lambda m: max(m.stage_memory_bytes))
    need_bytes = max(holder.stage_memory_bytes)
    stage = holder.stage_memory_bytes.index(need_bytes)
    grid = plan.grid_of(holder.module)
    own = {m.module: chain_peaks(problem, plan, [m], largest_loads(problem, plan, [m]))[0] for m in grid}
    holder = max(grid, key=lambda m: float(own[m.module][stage]))
    return holder, stage, need_bytes


def _no_memory_would_do(problem: Problem) -> InfeasiblePlanError:
    modules = [s.module for s in problem.specs]
    fixes = list(_fixes(problem))
    return InfeasiblePlanError(
        f"no layout of {', '.join(modules)} is possible on {problem.cluster.num_processes} process(es), whatever "
        "their memory",
        where=f"plan.share_ranks: {str(list(problem.space.share_ranks)).lower()}, tp per module "
        f"{ {s.module: problem.tps(s) for s in problem.specs} }",
        hint=f"any of these makes it possible: {', or '.join(fixes)}" if fixes else "allow more tp degrees or layouts",
    )
