"""All plans and policies on the same batches: data-blind ones, what experts of other trainers run, ours, the bound.

Every plan is tuned for the batches that it runs with, and all but the tuned uniform plan in arrival order are held to
their memory on the batches that they were tuned on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dflop.compare.experts import megatron, sharded
from dflop.compare.experts.expert_plan import ExpertPlan, with_all_degrees
from dflop.compare.unseen_batches import TRAINING_EFFORT, Steps, bound_s, judge
from dflop.cost.model import CostModel
from dflop.cost.throughput import Workload
from dflop.errors import InfeasiblePlanError
from dflop.plan.rank import policy_step_s
from dflop.plan.search import plan_problem
from dflop.plan.space import Problem
from dflop.plan.uniform import default_plan, tuned_uniform
from dflop.plan.worst import without_beyond
from dflop.progress import counted
from dflop.records import Plan, SampleShape
from dflop.records.speedup import NOT_COMPARED, Speedup, speedup
from dflop.report.tables import layout_text
from dflop.run.messages import Meter, Say
from dflop.schedule.policies import Effort

TUNED, DEFAULT, GROUPED = "uniform tuned", "uniform default", "length-grouped"
PACKED, EXPERT, SHARDED, OURS = "token LPT", "Megatron expert", "FSDP2", "dflop"
SEQUENCE, CONTEXT, IF_COMPILED = "FSDP2 + SP", "Megatron + CP", "dflop, if compiled"
SHARDED_EP, EXPERT_EP = "FSDP2 + EP", "Megatron + EP"
EXPERTS = (PACKED, EXPERT, SHARDED, SEQUENCE, CONTEXT, SHARDED_EP, EXPERT_EP)
"""What people run who look at their data: uniform and packed by tokens, layers cut by cost too, parameters shared,
samples shared by neighbouring ranks; of models with experts these shared by neighbouring ranks, too."""
UNIFORM = (TUNED, DEFAULT)
"""In arrival order."""
COMPILED = (EXPERT, SHARDED, SEQUENCE, CONTEXT, SHARDED_EP, EXPERT_EP)
"""Priced as compiled programs. Recipes of FSDP2 compile layers (torchtitan, fms-fsdp, KempnerForge); Megatron-LM has
fused kernels instead, and its published run is nearer to a compiled price than to an eager one. Uniform plans are of
this engine, which runs eager. `IF_COMPILED` is our plan at the same price: what planning gains beside them, and what
compiling would add."""

Planner = Callable[[Problem], ExpertPlan | None]
"""None, or an `InfeasiblePlanError`, where no such plan fits in memory or none exists."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What to plan, and what to judge plans on."""

    name: str
    mixture: str
    problem: Problem
    unseen: tuple[tuple[SampleShape, ...], ...]
    """Batches of other samples than the plan's, the same ones for every plan and policy."""
    cost_name: str
    workload: Workload
    """The unseen batches."""
    compiled: CostModel | None = None
    """Costs of the same modules compiled; None: not measured, and all are compared eager."""

    @property
    def num_gpus(self) -> int:
        return self.problem.cluster.num_processes


@dataclass(frozen=True, slots=True)
class Contest:
    """Simulated steps on the unseen batches of a setting."""

    setting: Setting
    entries: Mapping[str, ExpertPlan]
    """Plans with the policies that they run under, by name of the competitor, ours among them."""
    steps: Mapping[str, Steps]
    """By name of the competitor."""
    bound_s: tuple[float, ...]

    @property
    def ours(self) -> Plan:
        return self.entries[OURS].plan

    def speedup(self, name: str, over: str | None) -> Speedup:
        """Over another competitor; of no batches where one has no plan."""
        if over is None or not {name, over} <= self.steps.keys():
            return NOT_COMPARED
        return speedup(self.steps[over].step_s, self.steps[name].step_s)

    def exceeds_memory(self, name: str) -> bool:
        """Whether a plan has no room for the batches and largest samples that it was made for, or for an unseen one."""
        return self.steps[name].num_over_cap > 0 or not self.entries[name].holds(self.setting.problem)

    @property
    def baseline(self) -> str | None:
        """The faster uniform plan in arrival order whose memory holds everything; without any, the best expert."""
        return self._fastest_held(UNIFORM) or self.best_expert

    @property
    def best_expert(self) -> str | None:
        """The fastest of `EXPERTS` whose memory holds all batches; None where none does."""
        return self._fastest_held(EXPERTS)

    def _fastest_held(self, names: Sequence[str]) -> str | None:
        held = [name for name in names if name in self.steps and not self.exceeds_memory(name)]
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
        return self.bound_over(OURS)


def entry_text(entry: ExpertPlan, num_gpus: int = 0) -> str:
    """The layout in words, as `layout_text` has it, and how neighbouring ranks share samples."""
    return f"{layout_text(entry.plan, num_gpus)} {entry.sharing}".strip()


def _best_uniform(problem: Problem, policy: str) -> ExpertPlan | None:
    """The best of all uniform plans under a policy; in arrival order whether memory holds the batches or not."""
    is_held = policy != "arrival"
    plan = tuned_uniform(problem, lambda plan: policy_step_s(problem, plan, policy, is_held=is_held))
    return ExpertPlan(plan, problem.cost, policy) if plan else None


PLANNERS: Mapping[str, Planner] = {
    TUNED: partial(_best_uniform, policy="arrival"),
    DEFAULT: lambda problem: ExpertPlan(default_plan(problem), problem.cost, "arrival"),
    PACKED: partial(_best_uniform, policy="token_lpt"),
    EXPERT: megatron.expert_plan,
    SHARDED: sharded.fsdp_plan,
    SEQUENCE: sharded.sequence_parallel_plan,
    CONTEXT: sharded.context_parallel_plan,
    SHARDED_EP: sharded.expert_parallel_plan,
    EXPERT_EP: megatron.expert_parallel_plan,
}


def contest(setting: Setting, say: Say, *, effort: Effort = TRAINING_EFFORT, policies: Sequence[str] = ()) -> Contest:
    """Plans and judges everything; `policies` are others to judge our plan under, competitors by their names.

    Raises:
        InfeasiblePlanError: nothing fits in memory.
    """
    problem = setting.problem
    ours = plan_problem(problem, progress=say, at=Meter(say))[0]
    entries = {
        OURS: ExpertPlan(ours, problem.cost, "balanced"),
        **rivals(problem, ours, say, compiled=setting.compiled),
    }
    if policies:
        say(f"simulating our plan under {', '.join(policies)}, too")
    under = {policy: ExpertPlan(ours, problem.cost, policy) for policy in policies}
    return compete(setting, entries | if_compiled(setting, ours) | under, say, effort=effort)


def if_compiled(setting: Setting, ours: Plan) -> dict[str, ExpertPlan]:
    """Our plan, made for an eager program, at the costs of a compiled one; nothing where these are not known."""
    return {IF_COMPILED: ExpertPlan(ours, setting.compiled, "balanced")} if setting.compiled else {}


def rivals(
    problem: Problem,
    ours: Plan,
    say: Say,
    planners: Mapping[str, Planner] = PLANNERS,
    compiled: CostModel | None = None,
) -> dict[str, ExpertPlan]:
    """What `planners` plan, without the samples that `ours` leaves out; those that find nothing are absent.

    Args:
        problem: As ours was planned for.
        ours: Our plan.
        say: Receives lines on what happens.
        planners: By name.
        compiled: Costs of those in `COMPILED`; None: the problem's.
    """
    problem, found = without_beyond(problem, ours), dict[str, ExpertPlan]()
    fast = replace(problem, cost=compiled or problem.cost)
    if max(problem.specs[-1].ep_choices) > 1:
        fast = with_all_degrees(fast)
    for name in counted(tuple(planners), "planning baselines", Meter(say)):
        try:
            made = planners[name](fast if name in COMPILED else problem)
        except InfeasiblePlanError:
            made = None
        if made:
            found[name] = made
    if TUNED in found:
        found[GROUPED] = ExpertPlan(found[TUNED].plan, problem.cost, "length_grouped")
    return found


def compete(
    setting: Setting, entries: Mapping[str, ExpertPlan], say: Say, *, effort: Effort = TRAINING_EFFORT
) -> Contest:
    """Judges plans on the unseen batches."""
    problem, unseen = setting.problem, setting.unseen
    found = {
        name: judge(
            each.grouped,
            unseen,
            each.cost,
            problem.cluster,
            each.policy,
            effort=effort,
            keeps=partial(each.keeps, problem),
        )
        for name, each in counted(list(entries.items()), "simulating trainers", Meter(say))
    }
    return Contest(setting, entries, found, tuple(bound_s(problem, batch) for batch in unseen))
