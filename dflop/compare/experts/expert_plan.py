"""A plan of a trainer that can do what this engine cannot, and what it takes to judge it.

Neighbouring replicas may share samples: each has its part of every microbatch's tokens, and whole media items. Such a
plan is held to the bytes of the microbatches that its policy makes, not to the token caps of a scheduler with a choice,
which forbid few tokens beside many images.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from dflop.cost.model import CostModel, Floats
from dflop.plan.drafts import holding
from dflop.plan.grid_bytes import chain_peaks
from dflop.plan.space import Problem
from dflop.records import LLM, ModuleSpec, ParallelSpec, Plan
from dflop.schedule.assignment import Assignment
from dflop.schedule.policies import StepJob

TPS = (1, 2, 4, 8)
UNEVEN_RATIO = 1.03
"""Most of a microbatch's media items on one of the ranks that share it, over an even part."""


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """A plan with the costs and the policy that it was made with."""

    plan: Plan
    cost: CostModel
    """Costs of `grouped`."""
    policy: str
    num_sharing: int = 1
    """Neighbouring replicas that share every sample."""
    sharing: str = ""
    """How they do, and how many, in the field's words; empty where none do."""
    is_by_bytes: bool = False
    """Whether its memory is that of its microbatches; else the token caps of its plan hold."""
    freed_bytes: float = 0.0
    """Bytes a rank frees although the plan is charged with them."""

    @property
    def grouped(self) -> Plan:
        """The plan as steps are simulated: replicas that share samples are one, as tensor-parallel ranks are."""
        return in_groups(self.plan, self.num_sharing)

    def holds(self, problem: Problem) -> bool:
        """Whether it has room for the batches and largest samples that it was made for."""
        if not self.is_by_bytes:
            return holding(dataclasses.replace(problem, cost=self.cost), self.plan) is not None
        return holds(problem, self.plan, largest_samples(problem), self.num_sharing, self.freed_bytes)

    def keeps(self, problem: Problem, job: StepJob, assignment: Assignment) -> bool:
        """Whether it has room for microbatches of `grouped`."""
        if not self.is_by_bytes:
            return job.keeps_caps(assignment)
        return holds(problem, self.plan, job.judge.loads(assignment), self.num_sharing, self.freed_bytes)


def with_all_degrees(problem: Problem) -> Problem:
    """The same for trainers that cut every module whose heads divide, where this engine has no rule to cut it."""
    specs = tuple(
        dataclasses.replace(spec, tp_choices=tuple(sorted({*spec.tp_choices, *_dividing(spec)})))
        for spec in problem.specs
    )
    cost = CostModel(
        problem.cost.tables, problem.cost.corrections, specs=specs, links=problem.cost.links, extrapolate=True
    )
    return dataclasses.replace(problem, specs=specs, cost=cost)


def _dividing(spec: ModuleSpec) -> Iterator[int]:
    return (tp for tp in TPS if all(kind.num_heads % tp == kind.num_kv_heads % tp == 0 for kind in spec.kinds))


def in_groups(plan: Plan, num_sharing: int) -> Plan:
    """A colocated plan of one stage whose replicas are groups of so many; its token caps are left out."""
    modules = []
    for m in plan.modules if num_sharing > 1 else ():
        of = ParallelSpec(m.parallel.tp * num_sharing, 1, m.parallel.dp // num_sharing)
        shards = max(1, m.parameter_shards // num_sharing)
        modules.append(dataclasses.replace(m, parallel=of, parameter_shards=shards, max_tokens=0))
    return dataclasses.replace(plan, modules=tuple(modules)) if modules else plan


def holds(
    problem: Problem, plan: Plan, loads: Mapping[str, Floats], num_sharing: int, freed_bytes: float = 0.0
) -> bool:
    """Whether ranks have room for microbatches `[3, ...]` per module that so many of them share."""
    return bool((peak_bytes(problem, plan, loads, num_sharing) - freed_bytes <= problem.usable_bytes).all())


def peak_bytes(problem: Problem, plan: Plan, loads: Mapping[str, Floats], num_sharing: int) -> Floats:
    """Peak of the fullest of these ranks, per microbatch."""
    of_rank = [loads[m.module].reshape(3, -1) * rank_share(m.module, num_sharing) for m in plan.modules]
    return chain_peaks(problem, plan, plan.modules, of_rank)[:, 0]


def largest_samples(problem: Problem) -> dict[str, Floats]:
    """Per module `[3, samples]`: the largest samples of the profile, a microbatch each."""
    found = {}
    for spec in problem.specs:
        loads = [sample.load(spec.module) for sample in problem.worst_samples]
        columns = [(load.num_items, load.num_tokens, load.sum_sq_tokens) for load in loads]
        found[spec.module] = np.array(columns, dtype=np.float64).reshape(-1, 3).T
    return found


def rank_share(module: str, num_sharing: int) -> float:
    """Part of a microbatch that the fullest of the ranks has that share it: even of tokens, not quite of media."""
    return UNEVEN_RATIO ** (module != LLM and num_sharing > 1) / num_sharing
