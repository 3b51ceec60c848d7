"""What a plan loses where encoders are slower or faster than its data sheet says.

How large a part of the ranks encoders get depends on what they cost beside the LLM, and no published training tells
that. So the plan is simulated under encoders that take twice and half as long, beside the plan that is best there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from dflop.plan.rank import scheduled_step_s
from dflop.plan.search import plan_problem
from dflop.plan.space import Problem
from dflop.progress import At, unseen
from dflop.records import LLM, Plan

FACTORS = (0.5, 2.0)
"""Factors on the encoders' seconds."""


@dataclass(frozen=True, slots=True)
class Regret:
    """Under costs that differ from those a plan was made for."""

    factor: float
    """Factor on the encoders' seconds."""
    step_s: float
    """Seconds of the plan's step, simulated."""
    best: Plan
    """The one that would have been made."""

    @property
    def frac(self) -> float:
        """By how much the plan is slower; it may be the best one or, by the search's own noise, a little faster."""
        return max(0.0, self.step_s / self.best.predicted_step_s - 1)


def encoder_regrets(problem: Problem, plan: Plan, say: Callable[[str], None], at: At = unseen) -> tuple[Regret, ...]:
    """One per factor, each a search of its own; none for a model without encoders.

    Args:
        problem: What the plan was made for, on uncorrected costs.
        plan: Its best one.
        say: Receives lines on what happens.
        at: Receives how far each search is.
    """
    encoders = [spec.module for spec in problem.specs if spec.module != LLM]
    found = []
    for factor in FACTORS if encoders else ():
        say(f"planning with encoders that take {factor:g} times as long")
        changed = replace(problem, cost=problem.cost.with_corrections(dict.fromkeys(encoders, factor)))
        best = plan_problem(changed, at=at)[0]
        found.append(Regret(factor, scheduled_step_s(changed, plan), best))
    return tuple(found)
