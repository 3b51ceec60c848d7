"""All plans and policies on one setting: data-blind ones, what experts of other trainers run, ours, the bound.

Every plan is tuned for the batches that it runs with, and all but the tuned uniform plan in arrival order are held to
their memory on the batches that they were tuned on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dflop.compare.suite.cases import Setting
from dflop.compare.suite.unseen_batches import (
    TRAINING_EFFORT,
    Noise,
    Steps,
    bound_of_plan_s,
    bound_s,
    judge,
    module_gpu_seconds,
)
from dflop.cost.model import CostModel
from dflop.errors import InfeasiblePlanError
from dflop.plan.baselines.expert import POLICY as EXPERT_POLICY
from dflop.plan.baselines.expert import ExpertPlan, expert_plan
from dflop.plan.baselines.reference import reference_plan
from dflop.plan.baselines.sharded import tuned_sharded
from dflop.plan.baselines.uniform import default_plan, tuned_uniform
from dflop.plan.drafts import holding
from dflop.plan.rank import arrival_step_s, policy_step_s
from dflop.plan.search import plan_problem
from dflop.plan.space import Problem
from dflop.plan.worst import without_beyond
from dflop.progress import counted
from dflop.records import Plan
from dflop.records.speedup import NOT_COMPARED, Speedup, speedup
from dflop.run.messages import Meter, Say
from dflop.schedule.policies import Effort

TUNED, DEFAULT, GROUPED, REFERENCE = "uniform tuned", "uniform default", "length-grouped", "reference"
PACKED, EXPERT, SHARDED, OURS = "token LPT", "Megatron expert", "FSDP2", "dflop"
EXPERTS = (PACKED, EXPERT, SHARDED)
"""What people run who look at their data: uniform and packed by tokens, layers cut by cost too, parameters shared."""
RIVALS = (DEFAULT, GROUPED, REFERENCE, *EXPERTS)
"""Besides the tuned uniform plan, which all are measured by."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plans:
    """What competes on a setting; None where no such plan fits in memory or none exists."""

    tuned: Plan | None
    """Best of all feasible uniform plans, by simulation with arrival order."""
    default: Plan | None
    """Uniform with the largest tp and the least pp that fits, one sample a microbatch."""
    reference: Plan | None
    """The reference's literal rule."""
    reference_fits: bool
    """By our memory model; the reference has a rule of its own."""
    packed: Plan | None
    """Best of all uniform plans for samples packed longest first by tokens."""
    expert: ExpertPlan | None
    sharded: Plan | None
    """Best of all plans that cut nothing and share out parameters, for tokens balanced over ranks."""
    ours: Plan

    @property
    def named(self) -> dict[str, Plan]:
        """By competitor, those that there are."""
        found = {
            TUNED: self.tuned,
            DEFAULT: self.default,
            REFERENCE: self.reference,
            PACKED: self.packed,
            EXPERT: self.expert.plan if self.expert else None,
            SHARDED: self.sharded,
            OURS: self.ours,
        }
        return {name: plan for name, plan in found.items() if plan is not None}


@dataclass(frozen=True, slots=True)
class Contest:
    """Simulated steps on the unseen batches of a setting."""

    setting: Setting
    plans: Plans
    steps: Mapping[str, Steps]
    """By name of the competitor; those without a plan are absent."""
    bound_s: tuple[float, ...]
    bound_of_ours_s: tuple[float, ...]
    """The bound at the tp and recomputation of our plan."""

    def speedup(self, name: str, over: str | None = TUNED) -> Speedup:
        """Over another competitor, the tuned uniform plan unless given; of no batches where one has no plan."""
        if over is None or not {name, over} <= self.steps.keys():
            return NOT_COMPARED
        return speedup(self.steps[over].step_s, self.steps[name].step_s)

    def exceeds_memory(self, name: str) -> bool:
        """Whether a plan has no room for the batches and largest samples that it was made for, or for an unseen one."""
        if self.steps[name].num_over_cap > 0 or (name == REFERENCE and not self.plans.reference_fits):
            return True
        plans, problem = {GROUPED: self.plans.tuned, **self.plans.named}, self.setting.problem
        if name == EXPERT and self.plans.expert:
            problem = replace(problem, cost=self.plans.expert.cost)
        plan = plans.get(name, self.plans.ours)
        return plan is None or holding(problem, plan) is None

    @property
    def baseline(self) -> str | None:
        """The faster uniform plan in arrival order whose memory holds everything; without any, the best expert."""
        held = [name for name in (TUNED, DEFAULT) if name in self.steps and not self.exceeds_memory(name)]
        return min(held, key=lambda name: self.steps[name].mean_s, default=self.best_expert)

    @property
    def best_expert(self) -> str | None:
        """The fastest of `EXPERTS` whose memory holds all batches; None where none does."""
        held = [name for name in EXPERTS if name in self.steps and not self.exceeds_memory(name)]
        return min(held, key=lambda name: self.steps[name].mean_s, default=None)

    @property
    def over_experts(self) -> Speedup:
        """Ours over the best expert's."""
        return self.speedup(OURS, self.best_expert)

    def bound_over(self, name: str | None = TUNED) -> float:
        """As `speedup`, of the bound; NaN without a plan to compare with."""
        if name is None or name not in self.steps:
            return math.nan
        return speedup(self.steps[name].step_s, self.bound_s).mean

    @property
    def over_bound(self) -> float:
        """Our step over the bound."""
        return speedup(self.steps[OURS].step_s, self.bound_s).mean

    @property
    def over_bound_of_ours(self) -> float:
        """Our step over the bound at our plan's tp and recomputation."""
        return speedup(self.steps[OURS].step_s, self.bound_of_ours_s).mean


def contest(setting: Setting, say: Say, *, effort: Effort = TRAINING_EFFORT, policies: Sequence[str] = ()) -> Contest:
    """Plans and judges everything; `policies` are others to judge our plan under, competitors by their names.

    Raises:
        InfeasiblePlanError: nothing fits in memory.
    """
    plans = make_contestants(setting.problem, say)
    if policies:
        say(f"simulating our plan under {', '.join(policies)}, too")
    return compete(setting, plans, effort=effort, policies=policies, say=say)


def make_contestants(problem: Problem, say: Say) -> Plans:
    """All plans of a problem.

    Raises:
        InfeasiblePlanError: as `contest`.
    """
    at = Meter(say)
    ours = plan_problem(problem, progress=say, at=at)[0]
    problem = without_beyond(problem, ours)
    making: dict[str, Callable[[], Any]] = {
        TUNED: lambda: tuned_uniform(problem, lambda plan: arrival_step_s(problem, plan)),
        DEFAULT: lambda: default_plan(problem),
        REFERENCE: lambda: reference_plan(problem),
        PACKED: lambda: tuned_uniform(problem, lambda plan: policy_step_s(problem, plan, "token_lpt")),
        EXPERT: lambda: expert_plan(problem),
        SHARDED: lambda: tuned_sharded(problem, lambda plan: policy_step_s(problem, plan, "token_kk")),
    }
    made = {name: _or_none(making[name]) for name in counted(tuple(making), "planning baselines", at)}
    reference = made[REFERENCE]
    return Plans(
        made[TUNED],
        made[DEFAULT],
        reference.plan if reference else None,
        reference.fits if reference else False,
        made[PACKED],
        made[EXPERT],
        made[SHARDED],
        ours,
    )


def compete(
    setting: Setting,
    plans: Plans,
    *,
    effort: Effort = TRAINING_EFFORT,
    noise: Noise | None = None,
    policies: Sequence[str] = (),
    say: Say = lambda line: None,
) -> Contest:
    """Judges plans on the unseen batches; `noise` is what items cost besides what was predicted."""
    problem, unseen = setting.problem, setting.unseen

    def steps(plan: Plan, policy: str, cost: CostModel = problem.cost) -> Steps:
        return judge(plan, unseen, cost, problem.cluster, policy, effort=effort, noise=noise)

    rest: dict[str, tuple[Plan | None, str]] = {
        OURS: (plans.ours, "balanced"),
        TUNED: (plans.tuned, "arrival"),
        GROUPED: (plans.tuned, "length_grouped"),
        DEFAULT: (plans.default, "arrival"),
        REFERENCE: (plans.reference, "balanced"),
        PACKED: (plans.packed, "token_lpt"),
        SHARDED: (plans.sharded, "token_kk"),
        **{policy: (plans.ours, policy) for policy in policies},
    }
    entered = [(name, plan, policy) for name, (plan, policy) in rest.items() if plan]
    found = {name: steps(plan, policy) for name, plan, policy in counted(entered, "simulating trainers", Meter(say))}
    if plans.expert:
        found[EXPERT] = steps(plans.expert.plan, EXPERT_POLICY, plans.expert.cost)
    bounds = tuple(bound_s(problem, batch) for batch in unseen)
    return Contest(setting, plans, found, bounds, tuple(bound_of_plan_s(problem, plans.ours, b) for b in unseen))


def by_mixture(contests: Sequence[Contest]) -> list[tuple[str, list[Contest]]]:
    """Contests of each kind of data, in the order in which it first comes."""
    names = dict.fromkeys(c.setting.mixture for c in contests)
    return [(name, [c for c in contests if c.setting.mixture == name]) for name in names]


def encoder_share(problem: Problem) -> float:
    """Part of all GPU-seconds that encoders take, at the cheapest tp of each module."""
    batch = problem.batches[0]
    whole = bound_s(problem, batch)
    llm = problem.specs[-1]
    alone = min(module_gpu_seconds(problem, llm, batch, tp) for tp in problem.tps(llm))
    return 1 - alone / (whole * problem.cluster.num_processes)


def _or_none(make: Callable[[], T]) -> T | None:
    try:
        return make()
    except InfeasiblePlanError:
        return None
