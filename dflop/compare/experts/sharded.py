"""What users of FSDP2, HSDP or ZeRO-1 run without pipelines: tokens balanced over replicas by Karmarkar-Karp's method.

FSDP2 or HSDP, or ZeRO-1, as FSDP2 keeps weights whole for a step (`reshard_after_forward=False`) and sums gradients in
its last microbatch; the same with tensor and sequence parallelism, or with expert and sequence parallelism;
Megatron-LM with context parallelism.
Groups of a node or of all replicas share parameters, any number of microbatches; as few eighths of the layers recompute
as memory asks for, an eighth more, or all. The layout is tuned for the batches that it is run with, as that of the
uniform plans is: all are bounded from below, and simulated in that order until no bound is below the best.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflop.compare.experts.expert_plan import ExpertPlan, holds, in_groups, largest_samples
from dflop.compare.experts.shared_samples import CONTEXT, SEQUENCE, Sharing, shared_costs
from dflop.cost.identity import bytes_per_value
from dflop.cost.model import CostModel, Floats
from dflop.plan.candidates import recompute_ways, shard_choices
from dflop.plan.drafts import draft, fits
from dflop.plan.grid_choice import GridChoice
from dflop.plan.space import Problem
from dflop.plan.stage_params import FLOAT32_BYTES, stage_params
from dflop.plan.sync import experts_gather_seconds, plan_sync_s
from dflop.records import LLM, ParallelSpec, Plan, RunMode
from dflop.schedule.assignment import Assignment
from dflop.schedule.policies import QUICK, StepJob
from dflop.simulate.step import with_messages

EIGHTHS = 8
"""Parts of the layers that are recomputed, or not, as one."""
POLICY = "token_kk"
ROOM_RATIO = 1.03
"""What memory has to hold of microbatches over those of the batches that a plan is made on: others are longer."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Degrees of a layout."""

    tp: int
    num_sharing: int
    """Neighbouring replicas that share samples; together with tp no more than a node's ranks."""
    shards: int
    """Replicas that share out parameters; 1: the optimizer's states alone."""
    cost: CostModel
    ep: int = 1
    """Neighbouring replicas that share experts."""
    gathers_experts: bool = False
    """Whether a rank's experts are gathered for every pass, as its other layers are; else once per step."""

    @property
    def is_plain(self) -> bool:
        """Whether replicas are single ranks, held to token caps as the plans of this planner are."""
        return self.tp * self.num_sharing * self.ep == 1


@dataclass(frozen=True, slots=True)
class _Packed:
    """Batches of a problem in microbatches."""

    assignments: tuple[Assignment, ...]
    loads: Mapping[str, Floats]
    """Per module `[3, microbatches]` what memory has to hold."""


def fsdp_plan(problem: Problem) -> ExpertPlan | None:
    """The best plan that cuts neither layers nor samples and shares out parameters or states; None where none fits.

    Raises:
        CostError: a module without costs.
        InfeasiblePlanError: a module without any tp that its costs and the cluster allow.
    """
    return best_sharded(problem, SEQUENCE, [grid for grid in grids(problem, SEQUENCE, (1,)) if grid.tp == 1])


def sequence_parallel_plan(problem: Problem) -> ExpertPlan | None:
    """The same at any tp and degree of sequence parallelism; raises as `fsdp_plan`."""
    return best_sharded(problem, SEQUENCE, list(grids(problem, SEQUENCE, node_divisors(problem))))


def context_parallel_plan(problem: Problem) -> ExpertPlan | None:
    """The best plan under ZeRO-1, at any tp and degree of context parallelism above 1; raises as `fsdp_plan`."""
    return best_sharded(problem, CONTEXT, list(grids(problem, CONTEXT, node_divisors(problem)[1:])))


def expert_parallel_plan(problem: Problem) -> ExpertPlan | None:
    """The best plan that shares out parameters and experts, at any degree of sequence parallelism; raises as above.

    As VeOmni, ms-swift and torchtitan run it: groups of `ep` ranks in a node share experts, and ranks that have the
    same ones share these out by FSDP2. They are gathered for every pass, or kept whole for a step as with
    `reshard_after_backward=False` and gradients that are summed in the last microbatch. None without experts.
    """
    among = []
    for ep in problem.spec(LLM).ep_choices:
        for grid in grids(problem, SEQUENCE, node_divisors(problem), ep) if ep > 1 else ():
            among += [replace(grid, gathers_experts=way) for way in (False, True)]
    return best_sharded(problem, SEQUENCE, among)


def node_divisors(problem: Problem) -> list[int]:
    """Degrees that divide a node's processes."""
    each = problem.cluster.num_processes_per_node
    return [n for n in range(1, each + 1) if each % n == 0]


def grids(problem: Problem, sharing: Sharing, degrees: Sequence[int], ep: int = 1) -> Iterator[Grid]:
    """Every grid whose groups lie in a node; Ulysses' degree divides the heads of a tensor-parallel rank.

    Those that share experts share out parameters and have tp 1, in place of which they have sequence parallelism.
    """
    num_processes, each = problem.cluster.num_processes, problem.cluster.num_processes_per_node
    tps = set.intersection(*(set(problem.tps(spec)) for spec in problem.specs))
    num_heads = {kind.num_heads for kind in problem.specs[-1].kinds}
    for n in degrees:
        cost = problem.cost if n == ep == 1 else shared_costs(problem, sharing, n, ep)
        for tp in sorted(tps if ep == 1 else tps & {1}):
            if num_processes % (tp * n) or each % (tp * n) or any(heads % (tp * n) for heads in num_heads):
                continue
            choices = shard_choices(problem, RunMode(tp, ep=ep), np.array([num_processes // tp]))
            for shards in sorted({int(of[0]) for of in choices} - {0} if sharing is SEQUENCE else {1}):
                if shards % n == 0 or shards == ep == 1:
                    yield Grid(tp, n, shards, cost, ep)


def best_sharded(
    problem: Problem, sharing: Sharing, among: Sequence[Grid], shares: Sequence[int] = range(EIGHTHS + 1)
) -> ExpertPlan | None:
    """The plan with the fewest simulated seconds among those whose memory holds the batches.

    Args:
        problem: What is planned for.
        sharing: How neighbouring replicas share samples.
        among: Layouts.
        shares: Eighths of the layers that may be recomputed.
    """
    found: tuple[float, str, ExpertPlan] | None = None
    num_fitting = Counter[tuple[Grid, int]]()
    bounded = sorted((*b, i) for i, grid in enumerate(among) for b in bounds(problem, grid) if b[2] in shares)
    for least_s, m, eighths, i in bounded:
        grid = among[i]
        if found and least_s > found[0]:
            break
        if num_fitting[grid, m] > 1 and eighths < EIGHTHS:
            continue
        plan, n = sharded_plan(problem, grid, m, eighths), grid.num_sharing
        batches, freed = _packed(problem, in_groups(plan, n)), freed_bytes(problem, grid)
        if not (fits(problem, plan) if grid.is_plain else holds(problem, plan, batches.loads, n, freed)):
            continue
        num_fitting[grid, m] += 1
        words = f"{sharing.name}{n}" * (n > 1) + " experts gathered per pass" * grid.gathers_experts
        expert = ExpertPlan(plan, grid.cost, POLICY, n, words.strip(), not grid.is_plain, freed)
        step_s = _step_s(problem, expert, batches)
        if step_s < math.inf and (found is None or (step_s, plan.plan_id) < found[:2]):
            found = step_s, plan.plan_id, replace(expert, plan=replace(plan, predicted_step_s=step_s))
    return found and found[2]


def _packed(problem: Problem, plan: Plan) -> _Packed:
    """The batches of a problem by Karmarkar and Karp's method, the same for all plans with as many microbatches."""

    def packed() -> _Packed:
        assignments, loads = [], [largest_samples(problem)]
        for batch, items in zip(problem.batches, problem.batch_items, strict=True):
            job = StepJob(plan, batch, problem.cost, None, items)
            assignments.append(job.assign(POLICY, QUICK))
            cells = job.judge.loads(assignments[-1])
            loads.append({module: ROOM_RATIO * load.reshape(3, -1) for module, load in cells.items()})
        together = {s.module: np.concatenate([of[s.module] for of in loads], axis=1) for s in problem.specs}
        return _Packed(tuple(assignments), together)

    return problem.once(("packed", plan.module(LLM).parallel.dp, plan.num_microbatches), packed)


def _step_s(problem: Problem, expert: ExpertPlan, batches: _Packed) -> float:
    """Mean simulated step; infinite where a batch does not fit."""
    seconds, plan = [], expert.grouped
    for batch, items, assignment in zip(problem.batches, problem.batch_items, batches.assignments, strict=True):
        job = StepJob(plan, batch, expert.cost, problem.cluster.max_concurrency, items)
        if not (expert.is_by_bytes or job.keeps_caps(assignment)):
            return math.inf
        seconds.append(job.judge.step_s(assignment))
    return statistics.fmean(seconds) + plan.sync_s


def bounds(problem: Problem, grid: Grid) -> Iterator[tuple[float, int, int]]:
    """(no plan is faster, microbatches, eighths of the layers recomputed), memory not considered."""
    tp, num_groups = grid.tp * grid.num_sharing, problem.cluster.num_processes // (grid.tp * grid.num_sharing)
    counts = np.array([m for m in problem.microbatch_choices if m * num_groups <= problem.global_batch_size])
    ways = set.intersection(*(set(recompute_ways(problem, spec.module, grid.tp)) for spec in problem.specs))
    if not len(counts):
        return
    least = sharded_plan(problem, grid, int(counts[0]), 0 if False in ways else EIGHTHS)
    for eighths in [n for n in range(EIGHTHS + 1) if ways >= {n > 0}]:
        total_s: Floats = np.zeros(1)
        for spec, part in zip(problem.specs, least.modules, strict=True):
            passes_s = grid.cost.module_seconds(
                spec.module,
                problem.sample_loads[spec.module].per_microbatch(counts * num_groups),
                RunMode(tp, recompute=eighths / EIGHTHS),
                num_layers=spec.num_layers,
                edge=True,
            )
            gather_s, scatter_s = (sum(seconds) for seconds in (part.gather_s, part.scatter_s))
            for pass_s, message_s in zip(passes_s, (gather_s, gather_s + scatter_s), strict=True):
                total_s = total_s + with_messages(pass_s, message_s)
        least_s = counts * total_s.mean(axis=-1) + least.sync_s
        yield from ((float(s), int(m), eighths) for s, m in zip(least_s, counts, strict=True))


def sharded_plan(problem: Problem, grid: Grid, num_microbatches: int, eighths: int) -> Plan:
    """With so many eighths of every module's layers recomputed."""
    choice = GridChoice(
        ParallelSpec(grid.tp, 1, problem.cluster.num_processes // grid.tp, ep=grid.ep),
        {spec.module: (spec.num_layers,) for spec in problem.specs},
        {spec.module: (-(-spec.num_layers * eighths // EIGHTHS),) for spec in problem.specs},
        shard_optimizer=True,
        parameter_shards=grid.shards,
    )
    plan = draft(problem, num_microbatches, [choice], math.nan)
    return _gathering_experts(problem, plan) if grid.gathers_experts else plan


def _gathering_experts(problem: Problem, plan: Plan) -> Plan:
    """A plan with experts whose messages come in every microbatch instead of once a step."""
    *encoders, llm = plan.modules
    gather_s, scatter_s = experts_gather_seconds(problem, llm)
    llm = replace(
        llm,
        gather_s=tuple((gather_s + llm.gather_s).tolist()),
        scatter_s=tuple((scatter_s + llm.scatter_s).tolist()),
    )
    alone = [replace(m, parallel=replace(m.parallel, ep=1)) for m in plan.modules]
    sync_s = plan_sync_s(problem, alone, plan.num_microbatches)
    return replace(plan, modules=(*encoders, llm), sync_s=sync_s)


def freed_bytes(problem: Problem, grid: Grid) -> float:
    """Weights and gradients of a rank's experts, where they are not kept whole from pass to pass."""
    if not grid.gathers_experts:
        return 0.0
    spec, table = problem.spec(LLM), problem.cost.table(LLM, RunMode(grid.tp))
    params = stage_params(spec, np.array([[spec.num_layers]]), grid.tp, grid.ep)
    return float(params.whole_experts(table)[0, 0]) * (bytes_per_value(table.dtype) + FLOAT32_BYTES)
