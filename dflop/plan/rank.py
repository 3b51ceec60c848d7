"""From drafts to the plan that runs: simulated with the scheduler that will run, under the model's own errors.

The formula does not schedule, so it may only nominate. Rounds cost more and have fewer plans: all nominees on a few
batches with a quick search, those near the best on all batches, those still near with the search of training. All meet
residual noise, so that no plan wins by a prediction nobody can make. On the suite a quick search is within 2.5 % of the
long one, and two batches rank plans up to 8 % differently from four. The number of microbatches is chosen here, with
the scheduler, not by the formula.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dflop.plan.space import Problem
from dflop.progress import At, counted, unseen
from dflop.records import LLM, Plan
from dflop.schedule.policies import QUICK, Effort, StepJob
from dflop.simulate.step import Node

FIRST_BATCHES = 1
SECOND_PLANS, SECOND_FRAC = 16, 0.1
"""Plans that a quick search schedules on all batches: how many, and how much slower than the best of the first."""
FINAL_PLANS, FINAL_FRAC = 8, 0.02
"""The same of those that the long search schedules."""
NUM_NOISE_DRAWS = 4
UNKNOWN_ERROR_FRAC = 0.01
"""Median error from one load to the next of tables that were not fitted here: what a layer measured again on one H200
strayed by, 0.6 to 1.0 %. A data sheet's own error is of all loads alike, and `robust.py` asks what that does."""
SIGMA_OF_MEDIAN = 1.48
"""Standard deviation of a normal variable whose median absolute value is 1."""
MAX_ALIKE = 3
"""Nominees with the same layout of the LLM and a similar number of microbatches."""
MANY_MICROBATCHES = 12
MIN_OF_GRIDS = 4
MOVES_PER_SAMPLE = 40
"""The scheduler's moves in the last round: half as many as for 512 samples of a training step. With a hundredth of
them plans came out up to 8 % slower than they run, those whose replicas meet in every microbatch the most."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A plan with its simulated step times filled in."""

    plan: Plan
    noisy_step_s: float
    """Mean simulated step under the cost model's residual noise."""
    is_final: bool = False
    """Whether the long search scheduled it; the times of others are estimates from their ratio to the best plan."""


def nominate(drafts: Iterable[Plan], most: int) -> list[Plan]:
    """At most `most` drafts, best formula value first, none of a kind more than `MAX_ALIKE` times while others wait.

    `MIN_OF_GRIDS` of each number of grids are among them: the formula errs by other amounts for each.
    """
    ordered = sorted({d.plan_id: d for d in drafts}.values(), key=lambda d: (d.formula_step_s, d.plan_id))
    seen, with_grids = Counter[object](), Counter[int]()
    first, reserved, rest = list[Plan](), list[Plan](), list[Plan]()
    for draft in ordered:
        num_grids = len(draft.grids)
        kind = (num_grids, draft.module(LLM).parallel, draft.num_microbatches > MANY_MICROBATCHES)
        seen[kind] += 1
        if seen[kind] > MAX_ALIKE:
            rest.append(draft)
            continue
        first.append(draft)
        with_grids[num_grids] += 1
        if with_grids[num_grids] <= MIN_OF_GRIDS:
            reserved.append(draft)
    every = [*first, *rest]
    others = [draft for draft in every if draft not in reserved]
    return sorted([*reserved, *others][:most], key=every.index)


def thorough(problem: Problem) -> Effort:
    """What a plan is judged by that may run."""
    full = Effort()
    num_moves = min(full.max_simulations, MOVES_PER_SAMPLE * problem.global_batch_size)
    return replace(full, max_simulations=num_moves, max_evals=full.max_evals // 4)


def rank(problem: Problem, nominees: Sequence[Plan], policy: str = "balanced", at: At = unseen) -> list[Ranked]:
    """Plans that keep to the memory with their simulated times, fastest first; those of earlier rounds behind.

    Args:
        problem: What they are for.
        nominees: Drafts.
        policy: What will run.
        at: Receives how far it is.
    """
    each = counted([_Timed(plan) for plan in nominees], "simulating plans", at)
    left = _simulated(problem, each, slice(FIRST_BATCHES), QUICK, policy)
    near, chosen, final = list[_Timed](), list[_Timed](), list[_Timed]()
    while not final and (near or left):  # again only where no plan keeps the caps in every batch
        if not near:
            near, left = _near(left, SECOND_PLANS, SECOND_FRAC)
            if len(problem.batches) > FIRST_BATCHES:
                each = counted(near, "simulating plans on more batches", at)
                near = _simulated(problem, each, slice(FIRST_BATCHES, None), QUICK, policy)
        chosen, near = _near(near, FINAL_PLANS, FINAL_FRAC)
        final = _final(problem, chosen, policy, at)
    if not final:
        return []
    ids = [of.plan.plan_id for of in final]
    near += [of for of in chosen if of.plan.plan_id not in ids]
    # Batches differ by more than plans do, so others are compared with the best one on the same batches.
    quick = next(of for of in chosen if of.plan.plan_id == ids[0])
    scales = [final[0].mean_s() / quick.mean_s(k + 1) for k in range(len(quick.times))]
    estimated = [of.ranked(scales[len(of.times) - 1]) for of in (*near, *left)]
    return [*(of.ranked(is_final=True) for of in final), *sorted(estimated, key=lambda r: r.noisy_step_s)]


def _final(problem: Problem, chosen: Sequence[_Timed], policy: str, at: At) -> list[_Timed]:
    """The plans that the long search schedules on all batches, best first.

    Batch by batch its times take the place of the quick search's, and plans that are then too slow go.
    """
    num, effort, left = len(problem.batches), thorough(problem), list(chosen)
    for k in counted(range(num), "simulating the best plans with the long search, by the batch", at):
        found = ((of, _step_times(problem, of.plan, slice(k, k + 1), effort, policy)) for of in left)
        anew = (replace(of, times=(*of.times[:k], *times, *of.times[k + 1 :])) for of, times in found if times)
        left, _ = _near(sorted(anew, key=_Timed.order), FINAL_PLANS, FINAL_FRAC * (num - k - 1) / num or math.inf)
    return left


def _simulated(problem: Problem, timed: Iterable[_Timed], batches: slice, effort: Effort, policy: str) -> list[_Timed]:
    """Plans with the times of more batches, best first; without those that do not keep the caps."""
    pairs = ((of, _step_times(problem, of.plan, batches, effort, policy)) for of in timed)
    return sorted((replace(of, times=(*of.times, *times)) for of, times in pairs if times), key=_Timed.order)


@dataclass(frozen=True, slots=True)
class _Timed:
    """A plan, and per batch simulated so far its seconds, under noise, and in arrival order."""

    plan: Plan
    times: tuple[tuple[float, float, float], ...] = ()

    def order(self) -> tuple[float, int, str]:
        return self.ranked().noisy_step_s, self.plan.num_processes, self.plan.plan_id

    def mean_s(self, num_batches: int | None = None) -> float:
        return statistics.fmean(step_s for step_s, _, _ in self.times[:num_batches])

    def ranked(self, scale: float = 1.0, *, is_final: bool = False) -> Ranked:
        sync_s = self.plan.sync_s
        step_s, noisy_s, arrival_s = (scale * statistics.fmean(of) + sync_s for of in zip(*self.times, strict=True))
        plan = replace(self.plan, predicted_step_s=step_s, baseline_step_s=arrival_s)
        return Ranked(plan, noisy_s, is_final)


def _near(timed: Sequence[_Timed], most: int, slower_frac: float) -> tuple[list[_Timed], list[_Timed]]:
    """(the first of plans in order, at most so many and so much slower, and the first with one grid; the others)."""
    limit_s = (1 + slower_frac) * timed[0].order()[0] if timed else 0.0
    near = [of for of in timed[:most] if of.order()[0] <= limit_s]
    if all(len(of.plan.grids) > 1 for of in near):
        near += [of for of in timed[len(near) :] if len(of.plan.grids) == 1][:1]
    return near, [of for of in timed if of not in near]


def residual_sigma_frac(problem: Problem, plan: Plan) -> float:
    """By how much seconds of a stage stray from their prediction, the worst module's."""
    tables = [problem.cost.table(m.module, m.modes[-1]) for m in plan.modules]
    errors = [t.median_error_frac if t.source == "measured" else UNKNOWN_ERROR_FRAC for t in tables]
    return SIGMA_OF_MEDIAN * max(errors)


def scheduled_step_s(problem: Problem, plan: Plan, slowness: Mapping[Node, float] | None = None) -> float:
    """Mean simulated step of any plan, as that of candidates is found: for one that runs already, say.

    Args:
        problem: Batches and costs.
        plan: Need not keep to the memory.
        slowness: What multiplies the seconds of nodes; 1.0 where absent.
    """
    jobs = _jobs(problem, plan, slowness=slowness)
    return statistics.fmean(job.best(thorough(problem))[2] for job in jobs) + plan.sync_s


def arrival_step_s(problem: Problem, plan: Plan) -> float:
    """Mean simulated step of data-blind microbatches, whether they fit in memory or not."""
    return policy_step_s(problem, plan, "arrival", is_held=False)


def policy_step_s(problem: Problem, plan: Plan, policy: str, *, is_held: bool = True) -> float:
    """Mean simulated step under a policy; held to memory, infinite where a batch breaks the token caps."""
    step_s = []
    for job in _jobs(problem, plan):
        assignment = job.assign(policy, QUICK)
        if is_held and not job.keeps_caps(assignment):
            return math.inf
        step_s.append(job.judge.step_s(assignment))
    return statistics.fmean(step_s) + plan.sync_s


def _jobs(
    problem: Problem, plan: Plan, batches: slice = slice(None), slowness: Mapping[Node, float] | None = None
) -> list[StepJob]:
    limit = problem.cluster.max_concurrency
    pairs = list(zip(problem.batches, problem.batch_items, strict=True))[batches]
    return [StepJob(plan, batch, problem.cost, limit, items, slowness=slowness) for batch, items in pairs]


def _step_times(
    problem: Problem, plan: Plan, batches: slice, effort: Effort, policy: str
) -> list[tuple[float, float, float]]:
    """Per batch (seconds, under noise, in arrival order); empty when the scheduler finds nothing within token caps."""
    sigma_frac, found = residual_sigma_frac(problem, plan), []
    for job in _jobs(problem, plan, batches):
        best = job.assign(policy, effort)
        if not job.keeps_caps(best):
            return []
        noisy_s = job.judge.noisy_step_s(best, sigma_frac, NUM_NOISE_DRAWS)
        found.append((job.judge.step_s(best), noisy_s, job.judge.step_s(job.assign("arrival", effort))))
    return found
