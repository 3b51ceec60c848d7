"""Steps of unseen batches: simulated under a plan and a policy, and what no plan and no schedule can be faster than."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflop.cost.model import CostModel, Floats
from dflop.plan.space import Problem
from dflop.records import ClusterSpec, ModuleSpec, Plan, SampleShape
from dflop.schedule.assignment import Assignment
from dflop.schedule.evaluate import StepEvaluator
from dflop.schedule.items import ModuleItems, module_items
from dflop.schedule.policies import Effort, StepJob
from dflop.simulate.step import step_nodes

TRAINING_EFFORT = Effort()
"""Of `balanced`: what training spends. A quarter of it is 0 to 2 % slower on the mean of these cases."""


@dataclass(frozen=True, slots=True)
class Steps:
    """A plan and a policy on the same batches as all others."""

    step_s: tuple[float, ...]
    idle_frac: tuple[float, ...]
    """Of all GPUs of the cluster, those without work included."""
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
    noise: Noise | None = None,
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
        noise: What items cost besides what was predicted; None: nothing.
        keeps: Whether memory holds the microbatches of a batch.
    """
    found = []
    gpus = np.array([plan.module(module).parallel.group_size for module, _, _ in step_nodes(plan)])
    limit = cluster.max_concurrency if cluster.max_concurrency < plan.num_processes else None
    for number, batch in enumerate(batches):
        job = StepJob(plan, batch, cost, limit)
        assignment = job.assign(policy, effort)
        evaluator = job.judge
        if noise is not None:
            evaluator = StepEvaluator(plan, noise.of(job.items, number), job.cost, limit)
        work = evaluator.work(assignment)
        step_s = evaluator.step_s(assignment) + plan.sync_s
        busy_s = ((work.forward_s + work.backward_s) * work.is_active).sum(axis=1) @ gpus
        idle_frac = 1.0 - float(busy_s) / (step_s * cluster.num_processes)
        found.append((step_s, idle_frac, keeps(job, assignment)))
    return Steps(tuple(f[0] for f in found), tuple(f[1] for f in found), sum(not f[2] for f in found))


@dataclass(frozen=True, slots=True)
class Noise:
    """Lognormal factors on what each item costs, that no prediction knows of."""

    sigma: float
    seed: int

    def of(self, items: Mapping[str, ModuleItems], batch: int) -> dict[str, ModuleItems]:
        """Items of a batch whose loads are scaled one by one, with mean 1: the same for every plan and policy.

        Costs are lines in the load, so scaling an item's load scales its seconds; messages grow with it.
        """
        rng = np.random.default_rng([self.seed, batch])
        return {name: self._scaled(items[name], rng) for name in sorted(items)}

    def _scaled(self, items: ModuleItems, rng: np.random.Generator) -> ModuleItems:
        factors: Floats = rng.lognormal(-(self.sigma**2) / 2, self.sigma, len(items.sample))
        num_items, num_tokens, sum_sq_tokens = (part * factors for part in items.loads)
        # Loads are counts everywhere else, so mypy wants integers; here they are seconds in the making.
        scaled = {"num_items": num_items, "num_tokens": num_tokens, "sum_sq_tokens": sum_sq_tokens}
        return replace(items, **scaled)  # type: ignore[arg-type]  # seconds, not counts


def bound_s(problem: Problem, batch: Sequence[SampleShape]) -> float:
    """Seconds of one step when every GPU is busy with useful work from beginning to end.

    The GPU-seconds of every module at the tp that costs least of them, added up and divided over all GPUs. Left out are
    fill and drain of pipelines, uneven microbatches, fixed costs of a microbatch, messages, recomputation, gradient
    synchronisation, the optimizer, and that memory may forbid the cheapest tp. So it is a true lower bound where costs
    are lines, and no plan of a large model reaches it.
    """
    least_s = (min(module_gpu_seconds(problem, spec, batch, tp) for tp in problem.tps(spec)) for spec in problem.specs)
    return sum(least_s) / problem.cluster.num_processes


def bound_of_plan_s(problem: Problem, plan: Plan, batch: Sequence[SampleShape]) -> float:
    """The same at the tp and the recomputation that a plan chose: what of its distance they explain."""
    placed = {m.module: (m.parallel.tp, m.recomputed_frac()) for m in plan.modules}
    busy_s = (module_gpu_seconds(problem, spec, batch, *placed[spec.module]) for spec in problem.specs)
    return sum(busy_s) / problem.cluster.num_processes


def module_gpu_seconds(
    problem: Problem, spec: ModuleSpec, batch: Sequence[SampleShape], tp: int, recompute: float = False
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


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers; NaN of none."""
    return math.exp(statistics.fmean(map(math.log, values))) if values else math.nan
