"""What the scheduler process makes of what ranks measure: factors to plan with, and rows that tell of them.

For every plan that runs it keeps which sizes of items each microbatch's predicted seconds are of; when all ranks have
run it, their seconds are held against that. What this takes is measured, and counts as the cost that factors by size
and by rank have to earn.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dflop.config import Config
from dflop.correct.drift_detector import CostDrift, Found, ShapeDrift
from dflop.correct.times import Ints, StepTimes
from dflop.learn.cost_inputs import EarlierRuns
from dflop.learn.crossfit import without_uniform
from dflop.learn.decisions import Findings, JobFacts
from dflop.learn.learned_state import Knowledge, groups
from dflop.learn.size_buckets import batch_work, run_edges, usual_work
from dflop.learn.stalls import Stalls
from dflop.parallel.topology import seats
from dflop.records import Correction, Decision, Factors, GateReading, RankFactor, SampleShape, StepPlan
from dflop.schedule.attribution import BucketSeconds, bucket_seconds
from dflop.simulate.step import Node
from dflop.train.wire import RankTimes

Row = Correction | RankFactor | GateReading | Decision
Batch = Sequence[SampleShape]
COST_SMOOTHING = 0.15
"""Weight of the newest step in the average of what correcting costs."""
READING_SHARE = 0.005
"""Of the time that training takes: what readings of the gate may take, after the first few."""
NUM_FREE_READINGS = 12


class Learner:
    """Learns from the steps of one job, and says what to plan the next ones with.

    `prepare` may be called by any thread, the rest by one.

    Args:
        first_step: Of this start of the job: it is slow in every module, and nothing is learnt from it.
        learned: What `state` gave, in an earlier start of the scheduler or of the job.
        usual: Batches that the plan was made for; without any, nobody looks whether what comes is like them.
    """

    def __init__(
        self, config: Config, job: JobFacts, shapes: Batch, *, first_step: int, earlier: EarlierRuns,
        learned: Mapping[str, Any] | None = None, usual: Sequence[Batch] = (),
    ) -> None:  # fmt: skip
        self._is_enabled, self._mode = config.correct.enabled, config.correct.gate
        self._job, self._first_step = job, first_step
        self._nodes: dict[int, Node] = {s.rank: (s.module, s.stage, s.dp_rank) for s in seats(job.plan)}
        edges = run_edges(job.plan, job.cost, shapes)
        self._known = Knowledge(job, edges, earlier, learned)
        self._findings = Findings(job, self._applied(), self._known.full.beliefs())
        self._cost_drift = CostDrift(edges, groups(job.plan), self._applied())
        work = [batch_work(job.plan, job.cost, batch, edges) for batch in usual]
        self._shape_drift = ShapeDrift(edges, usual_work(work)) if work else None
        self._running: dict[int, tuple[Batch, BucketSeconds]] = {}
        """Per step, what was published and its expected seconds."""
        # Ranks that wait for others within forward and backward are held up by them.
        computes_alone = all(m.parallel.tp == 1 == m.parameter_shards for m in job.plan.modules)
        self._stalls = Stalls() if computes_alone and job.max_concurrency is None else None
        self._unread: tuple[int, Batch] | None = None
        self._meter = _Meter()
        self._reading_s = self._trained_s = self._step_s = 0.0
        self._num_readings = 0

    @property
    def factors(self) -> Factors:
        """What the next step is to be planned with."""
        return without_uniform(self._applied()) if self._is_enabled else Factors()

    def state(self) -> dict[str, Any]:
        """What was learnt, for JSON; nothing where nothing is."""
        return self._known.state() if self._is_enabled else {}

    def prepare(self, step: int, step_plan: StepPlan, batch: Batch) -> None:
        """A plan is about to run, whoever made it."""
        if self._is_enabled:
            with self._meter.running():
                expected_s = bucket_seconds(self._job.plan, step_plan, batch, self._job.cost, self._known.edges)
                self._running[step] = batch, expected_s

    def forget(self, step: int) -> None:
        """The plan that was prepared for a step does not run."""
        self._running.pop(step, None)

    def observe(self, step: int, seen: Sequence[RankTimes], effective_step: int, now_s: float) -> list[Row]:
        """What there is to tell of a step, prepared before, that all ranks have run; steps come in order.

        `effective_step` is the first that will be planned with what is learnt here.
        """
        running = self._running.pop(step, None)
        if running is None or step <= self._first_step or not seen:
            return []
        batch, expected_s = running
        with self._meter.running():
            times, microbatch = self._times(expected_s, seen)
            self._known.full.observe(times)
            if self._mode == "auto":
                self._known.halves.observe(step, times, microbatch)
                self._unread = (step, batch) if self._known.halves.has_seen_enough() else None
            rows = self._tell(step, effective_step, now_s)
            for d in self._drifts(times, batch):
                numbers = d.measured, d.expected, d.detail, now_s
                rows.append(self._findings.decision(step, d.kind, d.subject, "noticed", *numbers))
        self._step_s = max(times.step_s for times in seen)
        self._trained_s += self._step_s
        self._meter.step_took(self._step_s)
        return rows

    def wants_reading(self) -> bool:
        """Whether there is a step that the gate has not read and that it may take the time for."""
        if self._unread is None:
            return False
        return self._num_readings < NUM_FREE_READINGS or self._reading_s < READING_SHARE * self._trained_s

    def read_gate(self, effective_step: int, now_s: float) -> list[Row]:
        """Read what factors by size gain in the newest step; plans it twice for that.

        `effective_step` is the first that will be planned with what the gate says.
        """
        if self._unread is None:
            return []
        (step, batch), self._unread = self._unread, None
        begin_s = time.thread_time()
        gain_frac = self._known.halves.gain_frac(batch)
        self._reading_s += time.thread_time() - begin_s
        self._num_readings += 1
        gate, cost_frac = self._known.gate, self._meter.share
        has_switched = gate.read(gain_frac, cost_frac)
        mean, stderr, num = gate.mean_gain_frac, gate.stderr_frac, gate.num_readings
        of_job = self._job.run_id, self._job.attempt, step
        reading = GateReading(*of_job, gate.is_on, gain_frac, mean, stderr, cost_frac, num, now_s)
        if not has_switched:
            return [reading]
        which = "factors by size"
        detail = f"{which} are {'on' if gate.is_on else 'off'}: of a step they gain {mean:.1%} "
        detail += f"(standard error {stderr:.1%}, {num} readings) and cost {cost_frac:.2%}"
        switched = self._findings.decision(step, "gate", which, "done", mean, cost_frac, detail, now_s)
        return [reading, switched, *self._tell(step, effective_step, now_s)]

    def close(self, effective_step: int, now_s: float) -> list[Row]:
        """What was learnt, once more: it is as new as this, for later runs, even where nothing has moved."""
        beliefs = self._known.full.beliefs() if self._is_enabled else {}
        if not any(belief.num_observations for belief in beliefs.values()):
            return []
        return [*self._findings.corrections(effective_step, self._applied(), beliefs, now_s, all_of_them=True)]

    def _applied(self) -> Factors:
        """In force, with the buckets of every module."""
        is_by_size = self._mode == "on" or (self._mode == "auto" and self._known.gate.is_on)
        return self._known.full.factors(shapes=is_by_size, nodes=self._mode != "off")

    def _times(self, expected: BucketSeconds, seen: Sequence[RankTimes]) -> tuple[StepTimes, Ints]:
        """(measured and predicted seconds where there are both, their microbatches).

        Ranks of a tensor-parallel group wait for one another and take the same time: the last one speaks for all.
        """
        held_up: dict[int, float] = {}
        if self._stalls is not None:
            self._stalls.observe(seen)
            held_up = self._stalls.factors()
        nodes, expected_s = expected.nodes, expected.seconds
        position = {node: i for i, node in enumerate(nodes)}
        measured_s = np.zeros((len(nodes), self._job.plan.num_microbatches))
        for times in seen:
            row = measured_s[position[self._nodes[times.rank]]]
            row[list(times.compute_s)] = held_up.get(times.rank, 1.0) * np.array(list(times.compute_s.values()))
        has_work = np.any([seconds.any(axis=2) for seconds in expected_s.values()], axis=0)
        node, microbatch = np.nonzero((measured_s > 0) & has_work)
        found = {module: seconds[node, microbatch] for module, seconds in expected_s.items()}
        return StepTimes(nodes, node, measured_s[node, microbatch], found), microbatch

    def _tell(self, step: int, effective_step: int, now_s: float) -> list[Row]:
        applied, full = self._applied(), self._known.full
        return [
            *self._findings.corrections(effective_step, applied, full.beliefs(), now_s),
            *self._findings.rescaled(step, applied, now_s),
            *self._findings.ranks(step, effective_step, applied, full.node_beliefs(), now_s),
        ]

    def _drifts(self, times: StepTimes, batch: Batch) -> Iterator[Found]:
        yield from self._cost_drift.observe(times)
        if self._shape_drift is not None:
            yield from self._shape_drift.observe(*batch_work(self._job.plan, self._job.cost, batch, self._known.edges))


class _Meter:
    """Processor time of whatever runs under it, in any thread, per second of training, on average of the last steps.

    Readings of the gate have a share of their own, and are taken whether it is on or off.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spent_s = 0.0
        self._num_steps = 0
        self.share = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        begin_s = time.thread_time()
        try:
            yield
        finally:
            with self._lock:
                self._spent_s += time.thread_time() - begin_s

    def step_took(self, step_s: float) -> None:
        """A step is over; what was spent since the one before counts for it. The first one is slow at everything."""
        with self._lock:
            spent_s, self._spent_s = self._spent_s, 0.0
        self._num_steps += 1
        if self._num_steps == 1:
            return
        weight = max(1.0 / (self._num_steps - 1), COST_SMOOTHING)
        self.share += weight * (spent_s / max(step_s, 1e-6) - self.share)
