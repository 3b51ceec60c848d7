"""From observations of the same global batches under several policies to ratios, beside what simulations say.

Three figures stand for one ratio of step times. `measured`: wall seconds of real steps. `simulated`: the simulator on
cost tables profiled before training, nothing of the steps themselves. `replayed`: the simulator on the wall seconds
that each microbatch really took, so that what it and `measured` differ by is the simulator's fault, and what it and
`simulated` differ by that of the cost tables or of the machine's noise.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop.cost.fit import fit_cost_tables
from dflop.cost.model import CostModel, Floats
from dflop.plan.space import Problem
from dflop.plan.sync import plan_sync_s
from dflop.records import LLM, LinkCost, Measurement, ModuleSpec, Plan, SampleShape, StepObservation, StepPlan
from dflop.schedule.scheduler import predicted_spans, schedule_step
from dflop.simulate.events import Timeline
from dflop.simulate.step import Node, simulate_step
from tests.bench.schedule.real_cases import CLUSTER, Case, family_of

Durations = Mapping[Node, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Policy:
    """One policy in one case; seconds are means over global batches, idle shares are per process."""

    measured_step_s: float
    simulated_step_s: float
    replayed_step_s: float
    measured_idle_frac: tuple[float, ...]
    """Of the pipeline; of replicas, of the slower one's forward and backward."""
    simulated_idle_frac: tuple[float, ...]
    num_kept_arrival: int
    """Global batches for which the policy found nothing better than arrival order."""


@dataclass(frozen=True)
class Ratio:
    """Step time under one policy over that under another, on the same global batches; above 1 the latter is faster."""

    measured: float
    """Mean over global batches of the median over rounds."""
    measured_sd: float
    """Over global batches; 0 where there is one."""
    measured_of_batch: tuple[float, ...]
    noise_frac: float
    """Half the range over rounds of one batch's ratio, relative; median over batches."""
    simulated: float
    replayed: float
    replayed_cpu: float
    """As `replayed`, with thread CPU seconds: what it would be were nobody else on these cores."""


@dataclass(frozen=True)
class Outcome:
    """One case."""

    case: Case
    num_batches: int
    num_rounds: int
    encoder_frac: float | None
    """Of the CPU seconds of forward and backward; None where processes run whole models."""
    cpu_frac: float
    """Of the wall seconds of forward and backward, those on a core: below 1, others ran there, too."""
    compute_ratio: float
    """Predicted over measured CPU seconds of forward and backward."""
    replay_ratio: float
    """Step replayed from its own wall seconds over the measured one; median."""
    measured_tail_s: float
    simulated_tail_s: float
    policies: Mapping[str, Policy]
    ratios: Mapping[str, Ratio]


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

    def schedule(self, case: Case, batches: Sequence[Sequence[SampleShape]]) -> list[StepPlan]:
        """Every batch under every policy, in the order they shall be trained: no policy always comes first."""
        order = [
            (batch, case.policies[(i + shift) % len(case.policies)])
            for i, batch in enumerate(batches)
            for shift in range(len(case.policies))
        ]
        return [
            dataclasses.replace(
                schedule_step(run_id="bench", step=i, plan=case.plan, batch=batch, cost=self.cost, policy=policy),
                run_id=policy,
            )
            for i, (batch, policy) in enumerate(order)
        ]

    def tail_s(self, case: Case, batch: Sequence[SampleShape]) -> float:
        """Predicted seconds behind the pipeline: gradients summed over replicas, optimizer."""
        problem = Problem("bench", self.specs, CLUSTER, self.cost, (tuple(batch),), len(batch), snapshot_seq=0)
        return plan_sync_s(problem, case.plan.modules)

    def durations(self, plan: Plan, step_plan: StepPlan, batch: Sequence[SampleShape]) -> Durations:
        """Predicted, of one step."""
        spans = predicted_spans(plan, step_plan, batch, self.cost)
        return {node: [(s.forward_s, s.backward_s) for s in of] for node, of in spans.items()}


@dataclass(frozen=True)
class _Seen:
    """One step as its processes saw it together."""

    step_s: float
    pipeline_s: float
    idle_frac: tuple[float, ...]
    wall_s: Durations
    compute_s: Durations

    @classmethod
    def of(cls, plan: Plan, ranks: Sequence[StepObservation]) -> _Seen:
        pipeline_s = max(o.step_s - o.reduce_s - o.optimizer_s for o in ranks)
        nothing = [(0.0, 0.0)] * plan.num_microbatches
        # Of an inline plan the LLM's spans are the whole chain's; its encoders have nothing to add.
        nodes = [(m.module, s, r) for m in plan.modules for s in range(m.parallel.pp) for r in range(m.parallel.dp)]
        wall_s, compute_s = ({node: list(nothing) for node in nodes} for _ in "12")
        for o in ranks:
            node = o.module, o.stage, o.dp_rank
            for s in o.spans:
                wall_s[node][s.microbatch] = s.forward_s, s.backward_s
                compute_s[node][s.microbatch] = s.forward_compute_s, s.backward_compute_s
        idle_frac = tuple(1 - o.busy_s / pipeline_s for o in ranks)
        return cls(max(o.step_s for o in ranks), pipeline_s, idle_frac, wall_s, compute_s)

    @property
    def tail_s(self) -> float:
        return self.step_s - self.pipeline_s


def compare(
    case: Case, costs: Costs, step_plans: Sequence[StepPlan], batches: Sequence[Sequence[SampleShape]],
    rounds: Sequence[Sequence[Sequence[StepObservation]]],
) -> Outcome:  # fmt: skip
    """What `[round][step][rank]` observations say; `step_plans` are those of `Costs.schedule`."""
    plan, num_policies = case.plan, len(case.policies)
    seen = [[_Seen.of(plan, ranks) for ranks in of_round] for of_round in rounds]
    every = [s for of_round in seen for s in of_round]
    predicted = [costs.durations(plan, p, batches[i // num_policies]) for i, p in enumerate(step_plans)]
    tail_s = costs.tail_s(case, batches[0])

    def replay(s: _Seen, step: int, durations: Durations) -> float:
        return _simulate(plan, step_plans[step], durations).makespan_s + s.tail_s

    # [round, step]
    measured_s = np.array([[s.step_s for s in of_round] for of_round in seen])
    replayed_s = np.array([[replay(s, i, s.wall_s) for i, s in enumerate(of_round)] for of_round in seen])
    replayed_cpu_s = np.array([[replay(s, i, s.compute_s) for i, s in enumerate(of_round)] for of_round in seen])
    timelines = [_simulate(plan, p, d) for p, d in zip(step_plans, predicted, strict=True)]
    simulated_s = np.array([[p.predicted_step_s + tail_s for p in step_plans]])
    steps_of = {
        policy: np.array([i for i, p in enumerate(step_plans) if p.run_id == policy]) for policy in case.policies
    }

    def policy_figures(policy: str) -> Policy:
        steps = steps_of[policy]
        idle = np.array([[of_round[i].idle_frac for i in steps] for of_round in seen])
        busy = np.array([np.array(timelines[i].busy_s) / timelines[i].makespan_s for i in steps])
        return Policy(
            *(float(np.median(x[:, steps], axis=0).mean()) for x in (measured_s, simulated_s, replayed_s)),
            tuple(np.median(idle, axis=0).mean(axis=0).tolist()), tuple((1 - busy.mean(axis=0)).tolist()),
            num_kept_arrival=sum(step_plans[i].policy == "arrival" for i in steps),
        )  # fmt: skip

    def ratio(one: str, other: str) -> Ratio:
        def of(seconds: Floats) -> Floats:
            return seconds[:, steps_of[one]] / seconds[:, steps_of[other]]

        measured = of(measured_s)
        of_batch = np.median(measured, axis=0)
        simulated, replayed, replayed_cpu = (
            float(np.median(of(x), axis=0).mean()) for x in (simulated_s, replayed_s, replayed_cpu_s)
        )
        return Ratio(
            float(of_batch.mean()), statistics.stdev(of_batch) if len(of_batch) > 1 else 0.0, tuple(of_batch.tolist()),
            float(np.median(np.ptp(measured, axis=0) / 2 / of_batch)), simulated, replayed, replayed_cpu,
        )  # fmt: skip

    compute_s = sum(_total_s(s.compute_s) for s in every)
    encoder_s = sum(_total_s({n: d for n, d in s.compute_s.items() if n[0] != LLM}) for s in every)
    pairs = sorted(itertools.combinations(case.policies, 2), key=lambda pair: pair[1] != case.policies[-1])
    return Outcome(
        case, len(batches), len(rounds),
        encoder_frac=None if plan.is_inline else encoder_s / compute_s,
        cpu_frac=compute_s / sum(_total_s(s.wall_s) for s in every),
        compute_ratio=len(rounds) * sum(map(_total_s, predicted)) / compute_s,
        replay_ratio=float(np.median(replayed_s / measured_s)),
        measured_tail_s=statistics.median(s.tail_s for s in every), simulated_tail_s=tail_s,
        policies={policy: policy_figures(policy) for policy in case.policies},
        ratios={f"{one} / {other}": ratio(one, other) for one, other in pairs},
    )  # fmt: skip


def _total_s(durations: Durations) -> float:
    return sum(forward + backward for of in durations.values() for forward, backward in of)


def _simulate(plan: Plan, step_plan: StepPlan, durations: Durations) -> Timeline:
    return simulate_step(plan, step_plan.work, durations)
