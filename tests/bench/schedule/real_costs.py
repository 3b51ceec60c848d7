"""What a model costs on this machine, and what that says about steps: profiled, then corrected as a run corrects it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop.correct.estimate import Estimator
from dflop.correct.times import StageTime, StepTimes
from dflop.cost.fit import fit_cost_tables
from dflop.cost.model import CostModel
from dflop.plan.space import Problem
from dflop.plan.sync import plan_sync_s
from dflop.records import LinkCost, Measurement, ModuleSpec, Plan, SampleShape, StepObservation, StepPlan
from dflop.schedule.scheduler import predicted_spans, schedule_step
from dflop.simulate.events import Timeline
from dflop.simulate.step import Node, simulate_step
from tests.bench.schedule.real_cases import CLUSTER, Case, family_of

Durations = Mapping[Node, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Costs:
    """What one model costs."""

    specs: tuple[ModuleSpec, ...]
    cost: CostModel
    """Extrapolating."""

    @classmethod
    def fitted(cls, model: str, probes: Sequence[Measurement], links: Sequence[LinkCost]) -> Costs:
        specs = family_of(model).specs()
        return cls(specs, CostModel(fit_cost_tables(probes, specs), specs=specs, links=links, extrapolate=True))

    def schedule(self, case: Case, batches: Sequence[Sequence[SampleShape]], policies: Sequence[str]) -> list[StepPlan]:
        """Every batch under every policy, in the order they shall be trained: no policy always comes first.

        The policy that was asked for is the plan's `run_id`; its `policy` is what was found best.
        """
        order = [
            (batch, policies[(i + shift) % len(policies)])
            for i, batch in enumerate(batches)
            for shift in range(len(policies))
        ]
        return [
            dataclasses.replace(
                schedule_step(run_id="bench", step=i, plan=case.plan, batch=batch, cost=self.cost, policy=policy),
                run_id=policy,
            )
            for i, (batch, policy) in enumerate(order)
        ]

    def corrected(
        self,
        case: Case,
        step_plans: Sequence[StepPlan],
        batches: Sequence[Sequence[SampleShape]],
        steps: Sequence[Sequence[StepObservation]],
    ) -> Costs:
        """The costs after a run has seen `[step][rank]` observations of an encoder | LLM plan."""  # fmt: skip
        estimator = Estimator({t.module: () for t in self.cost.tables})
        for step_plan, batch, ranks in list(zip(step_plans, batches, steps, strict=True))[1:]:  # the first one is slow
            predicted = self.durations(case.plan, step_plan, batch)
            estimator.observe(StepTimes.of(time for seen in ranks for time in _times(seen, predicted)))
        levels = {module: belief.level for module, belief in estimator.beliefs().items()}
        return dataclasses.replace(self, cost=self.cost.with_corrections(levels))

    def uncorrected(self) -> Costs:
        return dataclasses.replace(self, cost=self.cost.with_corrections({}))

    def figures(self) -> dict[str, dict[str, float]]:
        """What the costs are worth, per module."""
        return {
            t.module: {
                "median_error_frac": t.median_error_frac,
                "noise_frac": t.noise_frac,
                "correction": self.cost.level(t.module),
            }
            for t in self.cost.tables
        }

    def tail_s(self, case: Case, batch: Sequence[SampleShape]) -> float:
        """Predicted seconds behind the pipeline: gradients summed over replicas, optimizer."""
        problem = Problem("bench", self.specs, CLUSTER, self.cost, (tuple(batch),), len(batch), snapshot_seq=0)
        return plan_sync_s(problem, case.plan.modules)

    def durations(self, plan: Plan, step_plan: StepPlan, batch: Sequence[SampleShape]) -> Durations:
        """Predicted, of one step."""
        spans = predicted_spans(plan, step_plan, batch, self.cost)
        return {node: [(s.forward_s, s.backward_s) for s in of] for node, of in spans.items()}


def _times(seen: StepObservation, predicted: Durations) -> Iterator[StageTime]:
    """Compute seconds of a rank's microbatches beside their prediction."""
    node = (seen.module, seen.stage, seen.dp_rank)
    for span in seen.spans:
        measured_s, predicted_s = (
            span.forward_compute_s + span.backward_compute_s,
            sum(predicted[node][span.microbatch]),
        )
        if predicted_s > 0:
            yield StageTime(node, measured_s, {seen.module: np.array([predicted_s])})


def simulated(plan: Plan, step_plan: StepPlan, durations: Durations) -> Timeline:
    """The pipeline of one step."""
    return simulate_step(plan, step_plan.work, durations)
