"""All plans and policies on one setting: data-blind ones, what experts of other trainers run, ours, the bound.

Every plan is tuned for the batches that it runs with, and all but the tuned uniform plan in arrival order are held to
their memory on the batches that they were tuned on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from dflop.errors import InfeasiblePlanError
from dflop.plan.baselines.expert import expert_plan
from dflop.plan.baselines.expert_plan import ExpertPlan
from dflop.plan.baselines.reference import reference_plan
from dflop.plan.baselines.sharded import context_parallel_plan, fsdp_plan, sequence_parallel_plan
from dflop.plan.baselines.uniform import default_plan, tuned_uniform
from dflop.plan.drafts import holding
from dflop.plan.rank import arrival_step_s, policy_step_s
from dflop.plan.search import plan_problem
from dflop.plan.space import Problem
from dflop.plan.worst import without_beyond
from dflop.progress import counted
from dflop.records import Plan
from dflop.records.speedup import NOT_COMPARED, Speedup, speedup
from dflop.report.tables import layout_text
from dflop.run.messages import Meter, Say
from dflop.schedule.policies import Effort

TUNED, DEFAULT, GROUPED, REFERENCE = "uniform tuned", "uniform default", "length-grouped", "reference"
PACKED, EXPERT, SHARDED, OURS = "token LPT", "Megatron expert", "FSDP2", "dflop"
SEQUENCE, CONTEXT = "FSDP2 + SP", "Megatron + CP"
EXPERTS = (PACKED, EXPERT, SHARDED, SEQUENCE, CONTEXT)
"""What people run who look at their data: uniform and packed by tokens, layers cut by cost too, parameters shared,
samples shared by neighbouring ranks."""
UNIFORM = (TUNED, DEFAULT)
"""In arrival order."""
RIVALS = (*UNIFORM, GROUPED, REFERENCE, *EXPERTS)

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
    experts: Mapping[str, ExpertPlan]
    """By their names in `EXPERTS`, those that there are."""
    ours: Plan

    @property
    def named(self) -> dict[str, Plan]:
        """By competitor, those that there are."""
        found = {
            TUNED: self.tuned,
            DEFAULT: self.default,
            REFERENCE: self.reference,
            **{name: expert.plan for name, expert in self.experts.items()},
            OURS: self.ours,
        }
        return {name: plan for name, plan in found.items() if plan is not None}

    def of(self, name: str) -> Plan:
        """The plan that a competitor runs; ours under any policy."""
        return {GROUPED: self.tuned, **self.named}.get(name) or self.ours

    def sharing(self, name: str) -> str:
        """How neighbouring ranks of that plan share samples; empty where none do."""
        return self.experts[name].sharing if name in self.experts else ""

    def layout(self, name: str) -> str:
        """Of that plan, in words."""
        return f"{layout_text(self.of(name))} {self.sharing(name)}".strip()


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

    def speedup(self, name: str, over: str | None) -> Speedup:
        """Over another competitor; of no batches where one has no plan."""
        if over is None or not {name, over} <= self.steps.keys():
            return NOT_COMPARED
        return speedup(self.steps[over].step_s, self.steps[name].step_s)

    def exceeds_memory(self, name: str) -> bool:
        """Whether a plan has no room for the batches and largest samples that it was made for, or for an unseen one."""
        if self.steps[name].num_over_cap > 0 or (name == REFERENCE and not self.plans.reference_fits):
            return True
        if name in self.plans.experts:
            return not self.plans.experts[name].holds(self.setting.problem)
        return holding(self.setting.problem, self.plans.of(name)) is None

    @property
    def baseline(self) -> str | None:
        """The faster uniform plan in arrival order whose memory holds everything; without any, the best expert."""
        held = [name for name in UNIFORM if name in self.steps and not self.exceeds_memory(name)]
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

    def bound_over(self, name: str | None) -> float:
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
        PACKED: lambda: _packed(problem),
        EXPERT: lambda: expert_plan(problem),
        SHARDED: lambda: fsdp_plan(problem),
        SEQUENCE: lambda: sequence_parallel_plan(problem),
        CONTEXT: lambda: context_parallel_plan(problem),
    }
    made = {name: _or_none(making[name]) for name in counted(tuple(making), "planning baselines", at)}
    reference = made[REFERENCE]
    return Plans(
        made[TUNED],
        made[DEFAULT],
        reference.plan if reference else None,
        reference.fits if reference else False,
        {name: expert for name in EXPERTS if (expert := made[name])},
        ours,
    )


def _packed(problem: Problem) -> ExpertPlan | None:
    """The best of all uniform plans for samples packed longest first by tokens."""
    policy = "token_lpt"
    plan = tuned_uniform(problem, lambda plan: policy_step_s(problem, plan, policy))
    return ExpertPlan(plan, problem.cost, policy) if plan else None


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
    rest: dict[str, tuple[Plan | None, str]] = {
        OURS: (plans.ours, "balanced"),
        TUNED: (plans.tuned, "arrival"),
        GROUPED: (plans.tuned, "length_grouped"),
        DEFAULT: (plans.default, "arrival"),
        REFERENCE: (plans.reference, "balanced"),
        **{policy: (plans.ours, policy) for policy in policies},
    }
    entered = {name: ExpertPlan(plan, problem.cost, policy) for name, (plan, policy) in rest.items() if plan}
    found = {
        name: judge(
            each.grouped,
            unseen,
            each.cost,
            problem.cluster,
            each.policy,
            effort=effort,
            noise=noise,
            keeps=partial(each.keeps, problem),
        )
        for name, each in counted(list({**entered, **plans.experts}.items()), "simulating trainers", Meter(say))
    }
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
