"""Do factors by size pay? One half of what was measured plans, the other half judges.

Both halves see every step, one the odd microbatches, the other the even ones, and they swap with each step. So their
errors have nothing to do with one another, and what noise makes look slow in one half gains nothing under the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflop.correct.estimate import Estimator
from dflop.correct.times import Ints, StepTimes
from dflop.cost.model import CostModel
from dflop.records import Factors, ModuleFactors, Plan, SampleShape, StepPlan
from dflop.schedule.policies import Effort
from dflop.schedule.step_scheduler import schedule_step, step_seconds
from dflop.simulate.jit import IS_COMPILED

EFFORT = Effort(max_simulations=2000, max_orders=12)
"""Of plans that are only compared: a tenth of the time, and two thirds of the gain, so the gate is on the safe side."""

MIN_PER_BUCKET = 4
"""Microbatches per factor that a half must have seen before anybody listens to it."""


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

    def observe(self, step: int, times: StepTimes, microbatch: Ints) -> None:
        """Learn from one step.

        Args:
            step: Decides which half goes where.
            times: Of the step.
            microbatch: `[n]`, of every row.
        """
        for half in (0, 1):
            (self._planner, self._judge)[half].observe(times.rows((step + microbatch) % 2 == half))

    def has_seen_enough(self) -> bool:
        """Whether both halves know something of every size of every module."""
        return all(
            belief.num_observations >= MIN_PER_BUCKET * len(belief.factors)
            for half in (self._planner, self._judge)
            for belief in half.beliefs().values()
        )

    def gain_frac(self, batch: Sequence[SampleShape], *, compiled: bool = IS_COMPILED) -> float:
        """What one half's factors by size save of a batch's step against its levels alone, as the other half sees it.

        With less of a search than plans that run; 0 where the factors are all alike. Slow ranks are known to all of
        them: those need no gate, for they are told by many steps or not at all.
        """
        by_size = without_uniform(self._planner.factors(shapes=True, nodes=True))
        if not any(found.edges for found in by_size.modules):
            return 0.0
        levels = without_uniform(self._planner.factors(shapes=False, nodes=True))
        corrected, plain = (self._planned(batch, factors, compiled) for factors in (by_size, levels))
        # A search has both among its candidates: it does not run the corrected one where the other looks better.
        if corrected.predicted_step_s >= self._step_s(plain, batch, by_size, compiled):
            return 0.0
        truth = without_uniform(self._judge.factors(shapes=True, nodes=True))
        with_s, without_s = (self._step_s(plan, batch, truth, compiled) for plan in (corrected, plain))
        return 1.0 - with_s / without_s if without_s > 0 else 0.0

    def states(self) -> list[dict[str, Any]]:
        """Of both estimators, for JSON."""
        return [self._planner.state(), self._judge.state()]

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what `states` gave."""
        for half, state in zip((self._planner, self._judge), states, strict=True):
            half.load(state)

    def _planned(self, batch: Sequence[SampleShape], factors: Factors, compiled: bool) -> StepPlan:
        return schedule_step(
            run_id="",
            step=0,
            plan=self._packing.plan,
            batch=batch,
            cost=self._packing.cost.with_corrections(factors.by_module()),
            max_concurrency=self._packing.max_concurrency,
            effort=EFFORT,
            slowness=factors.by_node(),
            compiled=compiled,
        )

    def _step_s(self, step_plan: StepPlan, batch: Sequence[SampleShape], factors: Factors, compiled: bool) -> float:
        """Seconds of a plan under factors that it was not made with."""
        cost = self._packing.cost.with_corrections(factors.by_module())
        return step_seconds(
            self._packing.plan,
            step_plan,
            batch,
            cost,
            factors.by_node(),
            self._packing.max_concurrency,
            compiled=compiled,
        )


def without_uniform(factors: Factors) -> Factors:
    """The same without buckets where all of a module have its level: what is alike need not be looked up by size."""
    return Factors(
        tuple(
            ModuleFactors(found.module, found.level) if set(found.factors) == {found.level} else found
            for found in factors.modules
        ),
        factors.nodes,
    )
