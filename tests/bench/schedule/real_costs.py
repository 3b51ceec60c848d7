"""What a model costs on this machine, and what that says about steps: profiled, then corrected as a run corrects it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflop.correct.estimate import ModuleCorrector
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
        corrector = ModuleCorrector({t.module: t.table_id for t in self.cost.tables})
        for step_plan, batch, ranks in zip(step_plans, batches, steps, strict=True):
            predicted = self.durations(case.plan, step_plan, batch)
            corrector.observe([_with_prediction(o, predicted[o.module, o.stage, o.dp_rank]) for o in ranks])
        corrector.corrections("bench", effective_step=len(steps), now_s=0.0)
        return dataclasses.replace(self, cost=self.cost.with_corrections(corrector.factors))

    def uncorrected(self) -> Costs:
        return dataclasses.replace(self, cost=self.cost.with_corrections({}))

    def figures(self) -> dict[str, dict[str, float]]:
        """What the costs are worth, per module."""
        return {
            t.module: {
                "median_error_frac": t.median_error_frac,
                "noise_frac": t.noise_frac,
                "correction": self.cost.corrections.get(t.module, 1.0),
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


def _with_prediction(seen: StepObservation, predicted: Sequence[tuple[float, float]]) -> StepObservation:
    spans = [
        dataclasses.replace(
            s, predicted_forward_s=predicted[s.microbatch][0], predicted_backward_s=predicted[s.microbatch][1]
        )
        for s in seen.spans
    ]
    return dataclasses.replace(seen, spans=tuple(spans))


def simulated(plan: Plan, step_plan: StepPlan, durations: Durations) -> Timeline:
    """The pipeline of one step."""
    return simulate_step(plan, step_plan.work, durations)
