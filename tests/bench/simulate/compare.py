"""What costs say about a case, and what its steps really took."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop.cost.fit import fit_cost_tables
from dflop.cost.links import fit_link_costs
from dflop.cost.model import CostModel
from dflop.plan.space import Problem
from dflop.plan.sync import plan_sync_s
from dflop.records import ClusterSpec, Plan, StepObservation
from dflop.schedule.scheduler import predicted_spans, schedule_step
from dflop.simulate.events import Timeline
from dflop.simulate.step import Node, simulate_step
from tests.bench.simulate.cases import BATCH_SIZE, MODELS, Case, family_of
from tests.bench.simulate.measure import Profiled, Run

NUM_CORES = 2
Durations = Mapping[Node, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Outcome:
    """One case, predicted and measured; seconds are means over its global batches."""

    name: str
    num_processes: int
    predicted_step_s: float
    measured_step_s: float
    error_frac: float
    noise_frac: float
    """Half the range over the rounds, relative; median over the batches."""
    predicted_idle_frac: float
    """Of the pipeline, as measured."""
    measured_idle_frac: float
    compute_ratio: float
    """Predicted over measured CPU seconds of forward and backward."""
    cpu_frac: float
    """Of the wall seconds of forward and backward, those on a core."""
    replay_ratio: float
    """Pipeline simulated with the measured seconds over the measured pipeline."""
    predicted_tail_s: float
    measured_tail_s: float

    def line(self) -> str:
        return (
            f"{self.name:57s} {1e3 * self.predicted_step_s:5.0f} {1e3 * self.measured_step_s:5.0f} ms"
            f"  {self.error_frac:5.1%}  {self.noise_frac:5.1%}"
            f"  idle {self.predicted_idle_frac:4.0%} {self.measured_idle_frac:4.0%}"
            f"  compute {self.compute_ratio:.2f} cpu {self.cpu_frac:.2f} replay {self.replay_ratio:.2f}"
            f"  tail {1e3 * self.predicted_tail_s:3.0f} {1e3 * self.measured_tail_s:3.0f} ms"
        )


class Predictor:
    """Costs of the models, and what they say about a case."""

    def __init__(self, profiled: Sequence[Profiled]) -> None:
        links = fit_link_costs(profiled[0].links)
        self._cost: dict[str, CostModel] = {}
        for model, found in zip(MODELS, profiled, strict=True):
            specs = family_of(model).specs()
            tables = fit_cost_tables(found.probes, specs)
            self._cost[model] = CostModel(tables, specs=specs, links=links, extrapolate=True)
            for table in tables:
                told = f"error {table.median_error_frac:.1%}, noise {table.noise_frac:.1%}"
                print(f"  {model}, {table.module}: {told}", file=sys.stderr)

    def schedule(self, case: Case, num_batches: int) -> Run:
        batches, plan = case.batches(num_batches), case.plan
        step_plans = tuple(
            schedule_step(
                run_id="bench", step=step, plan=plan, batch=batch, cost=self._cost[case.model], policy=case.policy,
                max_concurrency=_limit(plan),
            )
            for step, batch in enumerate(batches)
        )  # fmt: skip
        return Run(case, step_plans, tuple(tuple(batch) for batch in batches))

    def tail_s(self, case: Case) -> float:
        """Seconds behind the pipeline."""
        modules = case.plan.modules
        specs = tuple(s for s in family_of(case.model).specs() if s.module in {m.module for m in modules})
        cluster = ClusterSpec("bench", "local", 1, case.plan.num_processes, 1 << 30, "cpu", NUM_CORES)
        batches = tuple(case.batches(1))
        problem = Problem("bench", specs, cluster, self._cost[case.model], batches, BATCH_SIZE, snapshot_seq=0)
        return plan_sync_s(problem, modules)

    def durations(self, run: Run) -> list[Durations]:
        """Predicted, per global batch."""
        cost = self._cost[run.case.model]
        spans = [
            predicted_spans(run.case.plan, step_plan, batch, cost)
            for step_plan, batch in zip(run.step_plans, run.batches, strict=True)
        ]
        return [{node: [(s.forward_s, s.backward_s) for s in x] for node, x in of.items()} for of in spans]

    def compare(self, run: Run, steps: Sequence[Sequence[Sequence[StepObservation]]]) -> Outcome:
        """Outcome of a case whose `[round][batch][rank]` observations are `steps`."""
        plan, tail_s = run.case.plan, self.tail_s(run.case)
        predicted_s = np.array([p.predicted_step_s for p in run.step_plans]) + tail_s
        rounds = [[_Seen.of(plan, ranks) for ranks in of_round] for of_round in steps]
        measured_s = np.array([[s.step_s for s in of_round] for of_round in rounds])
        median_s = np.median(measured_s, axis=0)
        durations, every = self.durations(run), [s for of_round in rounds for s in of_round]
        timelines = [_simulate(run, b, d) for b, d in enumerate(durations)]
        replays = [_replayed_s(run, b, s) / s.pipeline_s for r in rounds for b, s in enumerate(r)]
        compute_s = sum(_total_s(s.compute_s) for s in every)
        return Outcome(
            name=f"{run.case.model}, {run.case.name}, {plan.num_microbatches} microbatches, {run.case.policy}",
            num_processes=plan.num_processes,
            predicted_step_s=float(predicted_s.mean()),
            measured_step_s=float(median_s.mean()),
            error_frac=float(np.median(np.abs(predicted_s / median_s - 1))),
            noise_frac=float(np.median(np.ptp(measured_s, axis=0) / 2 / median_s)),
            predicted_idle_frac=statistics.mean(t.idle_frac for t in timelines),
            measured_idle_frac=statistics.median(s.idle_frac for s in every),
            compute_ratio=len(rounds) * sum(map(_total_s, durations)) / compute_s,
            cpu_frac=compute_s / sum(_total_s(s.wall_s) for s in every),
            replay_ratio=statistics.median(replays),
            predicted_tail_s=tail_s,
            measured_tail_s=statistics.median(s.step_s - s.pipeline_s for s in every),
        )


@dataclass(frozen=True)
class _Seen:
    """One step as all ranks saw it together."""

    step_s: float
    pipeline_s: float
    idle_frac: float
    """Of the pipeline."""
    compute_s: Durations
    wall_s: Durations

    @classmethod
    def of(cls, plan: Plan, ranks: Sequence[StepObservation]) -> _Seen:
        pipeline_s = max(o.step_s - o.reduce_s - o.optimizer_s for o in ranks)
        compute_s, wall_s = ({(o.module, o.stage, o.dp_rank): _nothing(plan) for o in ranks} for _ in "12")
        for o in ranks:
            for s in o.spans:
                node = o.module, o.stage, o.dp_rank
                compute_s[node][s.microbatch] = s.forward_compute_s, s.backward_compute_s
                wall_s[node][s.microbatch] = s.forward_s, s.backward_s
        idle_frac = 1 - sum(o.busy_s for o in ranks) / (pipeline_s * len(ranks))
        return cls(max(o.step_s for o in ranks), pipeline_s, idle_frac, compute_s, wall_s)


def _nothing(plan: Plan) -> list[tuple[float, float]]:
    return [(0.0, 0.0)] * plan.num_microbatches


def _total_s(durations: Durations) -> float:
    return sum(forward + backward for found in durations.values() for forward, backward in found)


def _replayed_s(run: Run, batch: int, seen: _Seen) -> float:
    """Where processes share cores, what each computed is shared out anew."""
    is_crowded = _limit(run.case.plan) is not None
    return _simulate(run, batch, seen.compute_s if is_crowded else seen.wall_s).makespan_s


def _simulate(run: Run, batch: int, durations: Durations) -> Timeline:
    plan = run.case.plan
    return simulate_step(plan, run.step_plans[batch].work, durations, max_concurrency=_limit(plan))


def _limit(plan: Plan) -> int | None:
    return NUM_CORES if plan.num_processes > NUM_CORES else None
