"""What the scheduler process makes of what ranks measure: factors to plan with, and rows that tell of them.

For every plan that runs it keeps which sizes of items each microbatch's predicted seconds are of; when all ranks have
run it, their seconds are held against that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dflop.config import Config
from dflop.correct.drift_detector import CostDrift, Found, ShapeDrift
from dflop.correct.estimate import Prior
from dflop.correct.times import StepTimes
from dflop.learn.decisions import Findings, JobFacts
from dflop.learn.learned_state import LearnedState
from dflop.learn.size_buckets import batch_work, run_edges, usual_work
from dflop.learn.stalls import Stalls
from dflop.parallel.topology import seats
from dflop.records import Correction, Decision, Factors, ModuleFactors, RankFactor, SampleShape, StepPlan
from dflop.schedule.attribution import BucketSeconds, bucket_seconds
from dflop.simulate.step import Node, messages_s, step_nodes, without_messages
from dflop.train.wire import RankTimes

Row = Correction | RankFactor | Decision
Batch = Sequence[SampleShape]


class Learner:
    """Learns from the steps of one job, and says what to plan the next ones with.

    `prepare` may be called by any thread, the rest by one.

    Args:
        first_step: Of this start of the job: it is slow in every module, and nothing is learnt from it.
        learned: What `state` gave, in an earlier start of the scheduler or of the job.
        usual: Batches that the plan was made for; without any, nobody looks whether what comes is like them.
    """

    def __init__(
        self, config: Config, job: JobFacts, shapes: Batch, *, first_step: int, earlier: Mapping[str, Prior],
        learned: Mapping[str, Any] | None = None, usual: Sequence[Batch] = (),
    ) -> None:  # fmt: skip
        self._is_enabled = config.correct.enabled
        self._job, self._first_step = job, first_step
        self._nodes: dict[int, Node] = {s.rank: (s.module, s.stage, s.dp_rank) for s in seats(job.plan)}
        edges = run_edges(job.plan, job.cost, shapes)
        self._known = LearnedState(job, edges, earlier, learned)
        applied = self._known.estimator.factors()
        self._findings = Findings(job, applied, self._known.estimator.beliefs())
        self._cost_drift = CostDrift(edges, applied)
        work = [batch_work(job.plan, job.cost, batch, edges) for batch in usual]
        self._shape_drift = ShapeDrift(edges, usual_work(work)) if work else None
        self._running: dict[int, tuple[Batch, BucketSeconds]] = {}
        """Per step, what was published and its expected seconds."""
        # A GPU's clock runs on during messages, that of a thread does not.
        is_cuda = config.cluster.device == "cuda"
        self._message_s = np.array([is_cuda * messages_s(job.plan, node) for node in step_nodes(job.plan)])
        # Ranks that wait for others within forward and backward are held up by them.
        has_own_cores = job.plan.has_own_cores(job.max_concurrency or job.plan.num_processes)
        self._stalls = Stalls() if has_own_cores else None

    @property
    def factors(self) -> Factors:
        """What the next step is to be planned with."""
        return without_uniform(self._known.estimator.factors()) if self._is_enabled else Factors()

    def state(self) -> dict[str, Any]:
        """What was learnt, for JSON; nothing where nothing is."""
        return self._known.state() if self._is_enabled else {}

    def prepare(self, step: int, step_plan: StepPlan, batch: Batch) -> None:
        """A plan is about to run, whoever made it."""
        if self._is_enabled:
            expected_s = bucket_seconds(self._job.plan, step_plan, batch, self._job.cost, self._known.edges)
            self._running[step] = batch, expected_s

    def forget(self, step: int) -> None:
        """The plan that was prepared for a step does not run."""
        self._running.pop(step, None)

    def observe(self, step: int, seen: Sequence[RankTimes], effective_step: int, now_s: float) -> list[Row]:
        """What there is to tell of a step, prepared before, that all ranks have run; steps come in order.

        `effective_step` is the first that will be planned with what is learnt here.
        """
        if self._stalls is not None and step > self._first_step:
            self._stalls.observe(seen)
        running = self._running.pop(step, None)
        if running is None or step <= self._first_step or not seen:
            return []
        batch, expected_s = running
        self._known.estimator.observe(self._times(expected_s, seen))
        rows = self._tell(step, effective_step, now_s)
        for d in self._drifts(batch):
            numbers = d.measured, d.expected, d.detail, now_s
            rows.append(self._findings.decision(step, d.kind, d.subject, "noticed", *numbers))
        return rows

    def newly_busy(self) -> float:
        """Wall over compute time where other work has begun to use the ranks' cores, told once; else 0."""
        return self._stalls.newly_busy() if self._stalls is not None else 0.0

    def close(self, effective_step: int, now_s: float) -> list[Row]:
        """What was learnt, once more: it is as new as this, for later runs, even where nothing has moved."""
        estimator = self._known.estimator
        beliefs = estimator.beliefs() if self._is_enabled else {}
        if not any(belief.num_observations for belief in beliefs.values()):
            return []
        return [*self._findings.corrections(effective_step, estimator.factors(), beliefs, now_s, all_of_them=True)]

    def _times(self, expected: BucketSeconds, seen: Sequence[RankTimes]) -> StepTimes:
        """Measured seconds of computing and predicted ones where there are both.

        Of ranks that run a microbatch together the slowest speaks for all: tensor-parallel ones wait for one another in
        every layer, context-parallel ones where they share a sample.
        """
        held_up: dict[int, float] = {}
        if self._stalls is not None:
            held_up = self._stalls.factors()
        nodes, expected_s = expected.nodes, expected.seconds
        position = {node: i for i, node in enumerate(nodes)}
        measured_s = np.zeros((len(nodes), self._job.plan.num_microbatches))
        for times in seen:
            row = measured_s[position[self._nodes[times.rank]]]
            for k, seconds in times.compute_s:
                row[k] = max(row[k], held_up.get(times.rank, 1.0) * seconds)
        measured_s = without_messages(measured_s, self._message_s[:, np.newaxis])
        has_work = np.any([seconds.any(axis=2) for seconds in expected_s.values()], axis=0)
        node, microbatch = np.nonzero((measured_s > 0) & has_work)
        found = {module: seconds[node, microbatch] for module, seconds in expected_s.items()}
        return StepTimes(nodes, node, measured_s[node, microbatch], found)

    def _tell(self, step: int, effective_step: int, now_s: float) -> list[Row]:
        estimator = self._known.estimator
        applied, beliefs = estimator.factors(), estimator.beliefs()
        return [
            *self._findings.corrections(effective_step, applied, beliefs, now_s),
            *self._findings.rescaled(step, applied, now_s),
            *self._findings.ranks(step, effective_step, applied, estimator.node_beliefs(), now_s),
        ]

    def _drifts(self, batch: Batch) -> Iterator[Found]:
        yield from self._cost_drift.observe(self._known.estimator.beliefs())
        if self._shape_drift is not None:
            yield from self._shape_drift.observe(*batch_work(self._job.plan, self._job.cost, batch, self._known.edges))


def without_uniform(factors: Factors) -> Factors:
    """The same without buckets where all of a module have its level: what is alike need not be looked up by size."""
    modules = (ModuleFactors(m.module, m.level) if set(m.factors) == {m.level} else m for m in factors.modules)
    return Factors(tuple(modules), factors.nodes)
