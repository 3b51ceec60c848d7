"""Everyone on one setting, simulated: the suite's competitors, baselines charged for their memory, those that pad."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflop.jobs.suite.contest import (
    BATCHES,
    DEFAULT,
    GROUPED,
    OURS,
    REFERENCE,
    TOKEN_LPT,
    TUNED,
    Contest,
    compete,
    encoder_share,
    make_contestants,
)
from dflop.jobs.suite.judge import judge
from dflop.plan.rank import contention
from dflop.plan.search import plan_problem
from dflop.report.tables import layout_text
from dflop.schedule.policies import Effort, StepJob
from dflop.schedule.warm import warm
from tests.bench.claims.blind import Blind, BlindSteps, Padding, Tuned, mean_ratio
from tests.bench.claims.where import Where

TUNED_CHARGED, DEFAULT_CHARGED = "uniform tuned, charged", "uniform default, charged"
PADDED, PADDED_CHARGED = "padded", "padded, charged"
FIXED, FIXED_CHARGED = "fixed length", "fixed length, charged"
OUR_PLAN = "our plan, arrival order"
PAIRED = (TUNED, DEFAULT, GROUPED, REFERENCE, TOKEN_LPT, BATCHES, OUR_PLAN, OURS)
"""Those whose idle time is known."""
NUM_SCHEDULED = 4
"""Batches whose scheduling is timed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Simulated steps of everyone on the unseen batches of a setting."""

    where: Where
    encoder_share: float
    """Of all GPU-seconds, at every module's cheapest tp."""
    step_s: Mapping[str, tuple[float, ...]]
    """By competitor; those without a plan are absent."""
    idle_frac: Mapping[str, float]
    """Mean, of all GPUs; of those in `PAIRED`."""
    num_over_memory: Mapping[str, int]
    """Batches that would run out of memory, of as many as there are `step_s`."""
    layout: Mapping[str, str]
    bound_s: float
    bound_of_ours_s: float
    planning_cpu_s: float
    """Of our plan, its baselines included."""
    scheduling_cpu_s: tuple[float, ...]
    """Of a batch each, under our plan."""

    def gain(self, over: str, of: str = OURS) -> float:
        """Step time of one over that of another; NaN where either has no plan."""
        if over not in self.step_s or of not in self.step_s:
            return math.nan
        return mean_ratio(self.step_s[over], self.step_s[of])

    def mean_s(self, name: str) -> float:
        return statistics.fmean(self.step_s[name])

    def idle_s(self, name: str) -> float:
        """Idle seconds of a GPU in a step."""
        return self.idle_frac[name] * self.mean_s(name)

    @property
    def bound_gain(self) -> float:
        """Of perfect balance without a bubble at every module's best tp, over uniform tuned."""
        return self.mean_s(TUNED) / self.bound_s


def run_contest(where: Where) -> Outcome:
    """Plans and judges everyone.

    Raises:
        InfeasiblePlanError: nothing fits in memory, or no uniform plan does.
    """
    warm()
    setting = where.setting()
    problem = setting.problem
    started = time.process_time()
    plans = make_contestants(problem, lambda _: None)
    planning_cpu_s = time.process_time() - started
    contest = compete(setting, plans)
    ours_blind = judge(plans.ours, setting.unseen, problem.cost, problem.cluster, "arrival")
    steps = {**contest.steps, OUR_PLAN: ours_blind}
    blind = Blind(setting)
    tuned: dict[Padding, Tuned] = {padding: blind.tune(padding) for padding in ("", "microbatch", "batch")}
    named: dict[str, BlindSteps | None] = {
        TUNED_CHARGED: tuned[""].charged,
        DEFAULT_CHARGED: blind.charged_default(plans.default) if plans.default else None,
        PADDED: tuned["microbatch"].uncharged,
        PADDED_CHARGED: tuned["microbatch"].charged,
        FIXED: tuned["batch"].uncharged,
        FIXED_CHARGED: tuned["batch"].charged,
    }
    extra = {name: found for name, found in named.items() if found}
    return Outcome(
        where,
        encoder_share(problem),
        {name: s.step_s for name, s in steps.items()} | {name: s.step_s for name, s in extra.items()},
        {name: s.mean_idle_frac for name, s in steps.items()},
        {name: s.num_over_cap for name, s in steps.items()} | {name: s.num_over_memory for name, s in extra.items()},
        _layouts(contest) | {name: f"{layout_text(s.plan)}, {s.plan.num_microbatches}" for name, s in extra.items()},
        statistics.fmean(contest.bound_s),
        statistics.fmean(contest.bound_of_ours_s),
        planning_cpu_s,
        _scheduling_cpu_s(contest),
    )


def run_arrival_plan(where: Where) -> tuple[float, ...]:
    """Steps on the unseen batches of the plan that is best in arrival order: what the planner is worth by itself.

    Raises:
        InfeasiblePlanError: nothing fits in memory.
    """
    warm()
    setting = where.setting()
    plan = plan_problem(setting.problem, policy="arrival")[0]
    return judge(plan, setting.unseen, setting.problem.cost, setting.problem.cluster, "arrival").step_s


def _layouts(contest: Contest) -> dict[str, str]:
    plans = contest.plans
    named = {TUNED: plans.tuned, DEFAULT: plans.default, REFERENCE: plans.reference, OURS: plans.ours}
    return {name: f"{layout_text(p)}, {p.num_microbatches}" for name, p in named.items() if p}


def _scheduling_cpu_s(contest: Contest) -> tuple[float, ...]:
    """Seconds of this machine's processor for a batch each, with what training spends."""
    problem, plan = contest.setting.problem, contest.plans.ours
    found: list[float] = []
    for batch in contest.setting.unseen[:NUM_SCHEDULED]:
        started = time.process_time()
        StepJob(plan, batch, problem.cost, contention(problem, plan)).best(Effort())
        found.append(time.process_time() - started)
    return tuple(found)


def of_place(found: Sequence[Outcome], **wanted: object) -> list[Outcome]:
    """Outcomes whose place has these values."""
    return [o for o in found if all(getattr(o.where, key) == value for key, value in wanted.items())]
