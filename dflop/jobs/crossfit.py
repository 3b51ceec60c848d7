"""Do factors by size and by rank pay? One half of what was measured plans, the other half judges.

Both halves see every step, one the odd microbatches, the other the even ones, and they swap with each step. So their
errors have nothing to do with one another, and what noise makes look slow in one half gains nothing under the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflop.correct.estimate import Estimator, StageTime
from dflop.cost.model import CostModel
from dflop.records import Factors, ModuleFactors, Plan, SampleShape
from dflop.schedule.scheduler import schedule_step, step_seconds
from dflop.simulate.jit import IS_COMPILED


@dataclass(frozen=True, slots=True)
class Packing:
    """How steps of a job are packed, and judged."""

    plan: Plan
    cost: CostModel
    """Uncorrected."""
    max_concurrency: int | None


class CrossFit:
    """Two estimators that share no measurement.

    Args:
        planner: Its factors make plans.
        judge: Its factors score them.
        packing: Of the job.
    """

    def __init__(self, planner: Estimator, judge: Estimator, packing: Packing) -> None:
        self._planner, self._judge, self._packing = planner, judge, packing

    def observe(self, step: int, times: Mapping[int, Sequence[StageTime]]) -> None:
        """Learn from one step.

        Args:
            step: Decides which half goes where.
            times: By microbatch.
        """
        for half in (0, 1):
            found = [time for k, of_one in times.items() if (step + k) % 2 == half for time in of_one]
            (self._planner, self._judge)[half].observe(found)

    def gain_frac(self, batch: Sequence[SampleShape], *, compiled: bool = IS_COMPILED) -> float:
        """What one half's factors save of a batch's step against its levels alone, as the other half sees it.

        Quick plans, because this is done beside the real ones; 0 where the factors are all alike.
        """
        by_size = without_uniform(self._planner.factors(shapes=True, nodes=True))
        if is_uniform(by_size):
            return 0.0
        levels = without_uniform(self._planner.factors(shapes=False, nodes=False))
        truth = without_uniform(self._judge.factors(shapes=True, nodes=True))
        with_s, without_s = (self._step_s(batch, factors, truth, compiled) for factors in (by_size, levels))
        return 1.0 - with_s / without_s if without_s > 0 else 0.0

    def states(self) -> list[dict[str, Any]]:
        """Of both estimators, for JSON."""
        return [self._planner.state(), self._judge.state()]

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what `states` gave."""
        for half, state in zip((self._planner, self._judge), states, strict=True):
            half.load(state)

    def _step_s(self, batch: Sequence[SampleShape], factors: Factors, truth: Factors, compiled: bool) -> float:
        """Seconds under true factors of a quick plan that was made with others."""
        plan, cost, concurrency = self._packing.plan, self._packing.cost, self._packing.max_concurrency
        step_plan = schedule_step(
            run_id="",
            step=0,
            plan=plan,
            batch=batch,
            cost=cost.with_corrections(factors.by_module()),
            max_concurrency=concurrency,
            policy="quick",
            slowness=factors.by_node(),
            compiled=compiled,
        )
        true_cost = cost.with_corrections(truth.by_module())
        return step_seconds(plan, step_plan, batch, true_cost, truth.by_node(), concurrency, compiled=compiled)


def without_uniform(factors: Factors) -> Factors:
    """The same without buckets where all of a module have its level: what is alike need not be looked up by size."""
    return Factors(
        tuple(
            ModuleFactors(found.module, found.level) if set(found.factors) == {found.level} else found
            for found in factors.modules
        ),
        factors.nodes,
    )


def is_uniform(factors: Factors) -> bool:
    """Whether nothing but levels differs from 1."""
    return not factors.nodes and not any(found.edges for found in factors.modules)
