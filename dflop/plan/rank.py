"""From drafts to the plan that runs: simulated with the scheduler that will run, twice, under the model's own errors.

The formula does not schedule, so it may only nominate. A first round simulates every nominee on a few
batches with little search; a second one the best of them on all batches, and under residual noise, so that no plan wins
by a prediction nobody can make. The number of microbatches is chosen here, with the scheduler, not by the formula.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dflop.plan.space import Problem
from dflop.progress import At, counted, unseen
from dflop.records import LLM, Plan
from dflop.schedule.policies import QUICK, Effort, StepJob
from dflop.simulate.step import Node

FIRST_BATCHES, SECOND_PLANS = 2, 8
NUM_NOISE_DRAWS = 4
UNKNOWN_ERROR_FRAC = 0.01
"""Median error from one load to the next of tables that were not fitted here: what a layer measured again on one H200
strayed by, 0.6 to 1.0 %. A data sheet's own error is of all loads alike, and `robust.py` asks what that does."""
SIGMA_OF_MEDIAN = 1.48
"""Standard deviation of a normal variable whose median absolute value is 1."""
MAX_ALIKE = 3
"""Nominees with the same layout of the LLM and a similar number of microbatches."""
MANY_MICROBATCHES = 12
MIN_OF_LAYOUT = 4
MOVES_PER_SAMPLE = 40
"""Of the scheduler in the last round: half as many as it has for 512 samples of a training step. With a hundredth of
them plans came out up to 8 % slower than they run, those whose replicas meet in every microbatch the most."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A plan with its simulated step times filled in."""

    plan: Plan
    noisy_step_s: float
    """Mean simulated step under the cost model's residual noise."""
    first_step_s: float
    """As `predicted_step_s` of the plan, on the first few batches alone."""
    is_final: bool = False
    """Whether it was simulated on all batches; the others are no match for these."""


def nominate(drafts: Iterable[Plan], most: int) -> list[Plan]:
    """At most `most` drafts, best formula value first, none of a kind more than `MAX_ALIKE` times while others wait.

    `MIN_OF_LAYOUT` of each layout are among them: the formula errs by other amounts for each.
    """
    ordered = sorted({d.plan_id: d for d in drafts}.values(), key=lambda d: (d.formula_step_s, d.plan_id))
    seen, of_layout = Counter[object](), Counter[str]()
    first, reserved, rest = list[Plan](), list[Plan](), list[Plan]()
    for draft in ordered:
        kind = (draft.layout, draft.module(LLM).parallel, draft.num_microbatches > MANY_MICROBATCHES)
        seen[kind] += 1
        if seen[kind] > MAX_ALIKE:
            rest.append(draft)
            continue
        first.append(draft)
        of_layout[draft.layout] += 1
        if of_layout[draft.layout] <= MIN_OF_LAYOUT:
            reserved.append(draft)
    every = [*first, *rest]
    others = [draft for draft in every if draft not in reserved]
    return sorted([*reserved, *others][:most], key=every.index)


def thorough(problem: Problem) -> Effort:
    """What a plan is judged by that may run."""
    full = Effort()
    return dataclasses.replace(
        full, max_simulations=min(full.max_simulations, MOVES_PER_SAMPLE * problem.global_batch_size)
    )


def rank(problem: Problem, nominees: Sequence[Plan], policy: str = "balanced", at: At = unseen) -> list[Ranked]:
    """Plans that keep to the memory with their simulated times, fastest first; those of the first round behind.

    Args:
        problem: What they are for.
        nominees: Drafts.
        policy: What will run.
        at: Receives how far it is.
    """
    each = counted(nominees, "simulating plans", at)
    first = [found for plan in each if (found := _simulated(problem, plan, FIRST_BATCHES, QUICK, policy))]
    first.sort(key=_order)
    second = [
        dataclasses.replace(found, first_step_s=r.first_step_s, is_final=True)
        for r in counted(first[:SECOND_PLANS], "simulating the best plans on all batches", at)
        if (found := _simulated(problem, r.plan, None, thorough(problem), policy))
    ]
    return sorted(second, key=_order) + first[SECOND_PLANS:]


def residual_sigma_frac(problem: Problem, plan: Plan) -> float:
    """By how much seconds of a stage stray from their prediction, the worst module's."""
    tables = [problem.cost.table(m.module, m.parallel.tp, m.recompute) for m in plan.modules]
    errors = [t.median_error_frac if t.source == "measured" else UNKNOWN_ERROR_FRAC for t in tables]
    return SIGMA_OF_MEDIAN * max(errors)


def contention(problem: Problem, plan: Plan) -> int | None:
    """Processes of the plan that can compute at once, None where each has a device or core of its own."""
    limit = problem.cluster.max_concurrency
    return limit if limit < plan.num_processes else None


def scheduled_step_s(problem: Problem, plan: Plan, slowness: Mapping[Node, float] | None = None) -> float:
    """Mean simulated step of any plan, as that of candidates is found: for one that runs already, say.

    Args:
        problem: Batches and costs.
        plan: Need not keep to the memory.
        slowness: What multiplies the seconds of nodes; 1.0 where absent.
    """
    jobs = _jobs(problem, plan, None, slowness)
    return statistics.fmean(job.best(thorough(problem))[2] for job in jobs) + plan.sync_s


def arrival_step_s(problem: Problem, plan: Plan) -> float:
    """Mean simulated step of data-blind microbatches, whether they fit in memory or not."""
    return policy_step_s(problem, plan, "arrival", is_held=False)


def policy_step_s(problem: Problem, plan: Plan, policy: str, *, is_held: bool = True) -> float:
    """Mean simulated step under a policy; held to memory, infinite where a batch breaks the token caps."""
    step_s = []
    for job in _jobs(problem, plan, None):
        assignment = job.assign(policy, QUICK)
        if is_held and not job.keeps_caps(assignment):
            return math.inf
        step_s.append(job.judge.step_s(assignment))
    return statistics.fmean(step_s) + plan.sync_s


def _jobs(
    problem: Problem, plan: Plan, num_batches: int | None, slowness: Mapping[Node, float] | None = None
) -> list[StepJob]:
    limit = contention(problem, plan)
    pairs = list(zip(problem.batches, problem.batch_items, strict=True))[:num_batches]
    return [StepJob(plan, batch, problem.cost, limit, items, slowness=slowness) for batch, items in pairs]


def _simulated(problem: Problem, plan: Plan, num_batches: int | None, effort: Effort, policy: str) -> Ranked | None:
    """None when the scheduler finds nothing that keeps the token caps, which are the memory's."""
    sigma_frac = residual_sigma_frac(problem, plan)
    step_s, noisy_s, arrival_s = [], [], []
    for job in _jobs(problem, plan, num_batches):
        best = job.assign(policy, effort)
        best_s = job.judge.step_s(best)
        if not job.keeps_caps(best):
            return None
        step_s.append(best_s)
        arrival_s.append(job.judge.step_s(job.assign("arrival", effort)))
        noisy_s.append(job.judge.noisy_step_s(best, sigma_frac, NUM_NOISE_DRAWS))
    timed = dataclasses.replace(
        plan,
        predicted_step_s=statistics.fmean(step_s) + plan.sync_s,
        baseline_step_s=statistics.fmean(arrival_s) + plan.sync_s,
    )
    return Ranked(timed, statistics.fmean(noisy_s) + plan.sync_s, timed.predicted_step_s)


def _order(ranked: Ranked) -> tuple[float, int, str]:
    return ranked.noisy_step_s, ranked.plan.num_processes, ranked.plan.plan_id
