"""Do factors by size pay? One half of what was measured plans, the other half judges.

Both halves see every step, one the odd microbatches, the other the even ones, and they swap with each step. So their
errors have nothing to do with one another, and what noise makes look slow in one half gains nothing under the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflop.correct.estimate import Estimator
from dflop.correct.times import Ints, StepTimes
from dflop.learn.decisions import JobFacts
from dflop.records import Factors, ModuleFactors, SampleShape, StepPlan
from dflop.schedule.policies import Effort
from dflop.schedule.step_scheduler import schedule_step, step_seconds

EFFORT = Effort(max_simulations=2000)
"""Of plans that are only compared: a tenth of the time, and two thirds of the gain, so the gate is on the safe side."""

MIN_PER_BUCKET = 4
"""Microbatches per factor that a half must have seen before anybody listens to it."""


class CrossFit:
    """Two estimators that share no measurement: factors of one make plans, those of the other score them."""

    def __init__(self, planner: Estimator, judge: Estimator, job: JobFacts) -> None:
        self._planner, self._judge, self._job = planner, judge, job

    def observe(self, step: int, times: StepTimes, microbatch: Ints) -> None:
        """Learn from one step, which decides which half goes where; `microbatch` is `[n]`, of every row."""
        for half in (0, 1):
            (self._planner, self._judge)[half].observe(times.rows((step + microbatch) % 2 == half))

    def has_seen_enough(self) -> bool:
        """Whether both halves know something of every size of every module."""
        return all(
            belief.num_observations >= MIN_PER_BUCKET * len(belief.factors)
            for half in (self._planner, self._judge)
            for belief in half.beliefs().values()
        )

    def gain_frac(self, batch: Sequence[SampleShape]) -> float:
        """What one half's factors by size save of a batch's step against its levels alone, as the other half sees it.

        With less of a search than plans that run; 0 where the factors are all alike. Slow ranks are known to all of
        them: those need no gate, for they are told by many steps or not at all.
        """
        by_size = without_uniform(self._planner.factors(shapes=True, nodes=True))
        if not any(found.edges for found in by_size.modules):
            return 0.0
        levels = without_uniform(self._planner.factors(shapes=False, nodes=True))
        corrected, plain = (self._planned(batch, factors) for factors in (by_size, levels))
        # A search has both among its candidates: it does not run the corrected one where the other looks better.
        if corrected.predicted_step_s >= self._step_s(plain, batch, by_size):
            return 0.0
        truth = without_uniform(self._judge.factors(shapes=True, nodes=True))
        with_s, without_s = (self._step_s(plan, batch, truth) for plan in (corrected, plain))
        return 1.0 - with_s / without_s if without_s > 0 else 0.0

    def _planned(self, batch: Sequence[SampleShape], factors: Factors) -> StepPlan:
        job, cost = self._job, self._job.cost.with_corrections(factors.by_module())
        return schedule_step(
            run_id="", step=0, plan=job.plan, batch=batch, cost=cost, max_concurrency=job.max_concurrency,
            effort=EFFORT, slowness=factors.by_node(),
        )  # fmt: skip

    def _step_s(self, step_plan: StepPlan, batch: Sequence[SampleShape], factors: Factors) -> float:
        """Seconds of a plan under factors that it was not made with."""
        job, cost, by_node = self._job, self._job.cost.with_corrections(factors.by_module()), factors.by_node()
        return step_seconds(job.plan, step_plan, batch, cost, by_node, job.max_concurrency)


def without_uniform(factors: Factors) -> Factors:
    """The same without buckets where all of a module have its level: what is alike need not be looked up by size."""
    modules = (ModuleFactors(m.module, m.level) if set(m.factors) == {m.level} else m for m in factors.modules)
    return Factors(tuple(modules), factors.nodes)
