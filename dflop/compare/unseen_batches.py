"""Steps of unseen batches: simulated under a plan and a policy, and what no plan and no schedule can be faster than."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dflop.cost.model import CostModel
from dflop.plan.space import Problem
from dflop.records import ClusterSpec, ModuleSpec, Plan, RunMode, SampleShape
from dflop.schedule.assignment import Assignment
from dflop.schedule.items import module_items
from dflop.schedule.policies import Effort, StepJob
from dflop.simulate.step import step_nodes

TRAINING_EFFORT = Effort()
"""Search effort of `balanced`, as in training. A quarter of it is 0 to 2 % slower on the mean of these cases."""


@dataclass(frozen=True, slots=True)
class Steps:
    """A plan and a policy on the same batches as all others."""

    step_s: tuple[float, ...]
    idle_frac: tuple[float, ...]
    """Idle share of all GPUs of the cluster, GPUs without work included."""
    num_over_cap: int
    """Batches with a microbatch of more tokens than the plan's memory holds: it would run out of memory."""

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.step_s)

    @property
    def mean_idle_frac(self) -> float:
        return statistics.fmean(self.idle_frac)


def judge(
    plan: Plan,
    batches: Sequence[Sequence[SampleShape]],
    cost: CostModel,
    cluster: ClusterSpec,
    policy: str,
    *,
    effort: Effort = TRAINING_EFFORT,
    keeps: Callable[[StepJob, Assignment], bool] = StepJob.keeps_caps,
) -> Steps:
    """Simulated steps, gradient synchronisation and optimizer included.

    Args:
        plan: Layout.
        batches: Global batches.
        cost: What batches are scheduled by.
        cluster: All of its GPUs count as idle when the plan leaves them out.
        policy: One of `dflop.schedule.policies.POLICIES`.
        effort: Budget of `balanced`.
        keeps: Whether memory holds the microbatches of a batch.
    """
    found = []
    gpus = np.array([plan.module(module).parallel.group_size for module, _, _ in step_nodes(plan)])
    limit = cluster.max_concurrency if cluster.max_concurrency < plan.num_processes else None
    for batch in batches:
        job = StepJob(plan, batch, cost, limit)
        assignment = job.assign(policy, effort)
        work = job.judge.work(assignment)
        step_s = job.judge.step_s(assignment) + plan.sync_s
        busy_s = ((work.forward_s + work.backward_s) * work.is_active).sum(axis=1) @ gpus
        idle_frac = 1.0 - float(busy_s) / (step_s * cluster.num_processes)
        found.append((step_s, idle_frac, keeps(job, assignment)))
    return Steps(tuple(f[0] for f in found), tuple(f[1] for f in found), sum(not f[2] for f in found))


def bound_s(problem: Problem, batch: Sequence[SampleShape]) -> float:
    """Seconds of one step when every GPU is busy with useful work from beginning to end.

    The GPU-seconds of every module at the tp that costs least of them, added up and divided over all GPUs. Left out are
    fill and drain of pipelines, uneven microbatches, fixed costs of a microbatch, messages, recomputation, gradient
    synchronisation, the optimizer, and that memory may forbid the cheapest tp. So it is a true lower bound where costs
    are lines, and no plan of a large model reaches it.
    """
    least_s = (min(module_gpu_seconds(problem, spec, batch, tp) for tp in problem.tps(spec)) for spec in problem.specs)
    return sum(least_s) / problem.cluster.num_processes


def module_gpu_seconds(
    problem: Problem, spec: ModuleSpec, batch: Sequence[SampleShape], tp: int, recompute: float = False
) -> float:
    """GPU-seconds of all of a batch's items in one module, without fixed costs."""
    items = module_items(batch, spec.module)
    seconds = problem.cost.item_seconds(
        spec.module,
        np.array([float(part.sum()) for part in items.loads]),
        RunMode(tp, recompute=recompute),
        num_layers=spec.num_layers,
        edge=True,
        factor=problem.cost.level(spec.module),
    )
    return tp * float(seconds)
