"""The scheduler process of a training job: cost tables in, StepPlans out, corrections back.

It runs beside the ranks, some steps ahead of them. It reads cost tables and corrections from a snapshot of the store
once, packs each global batch, publishes the StepPlan on the job's key-value store, listens to what the ranks measured,
and spools plans and corrections. What other runs learn meanwhile counts from its next start on. When it falls behind
it makes quick plans until it has caught up; when it dies, rank 0 goes on without it and starts it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

from dflop.config import Config
from dflop.correct.estimate import ModuleCorrector, SpanKey
from dflop.cost.model import CostModel
from dflop.errors import DflopError
from dflop.jobs.inputs import read_costs, run_input
from dflop.jobs.rundir import RunDir, open_run
from dflop.jobs.steps import COMPARE, QUICK, TRAIN, GlobalBatches, StepSpec, job_steps, stage_of_job
from dflop.records import Factors, ModuleFactors, Plan, RunEvent, SampleShape, StepObservation, from_dict
from dflop.schedule.policies import Effort
from dflop.schedule.scheduler import predicted_spans, schedule_step, stage_shares, stage_spans
from dflop.schedule.warm import warm
from dflop.simulate.jit import IS_COMPILED
from dflop.store.spool import SpoolWriter
from dflop.train import wire
from dflop.train.checkpoint import read_latest
from dflop.train.wire import PlanMessage, Store

IDLE_S = 0.02
SHARED_CORES_EFFORT = Effort(max_simulations=10_000)
"""Where ranks compute on all cores and every second of the search is one of theirs: a fraction of the time, and all but
half a percent of the gain."""
_PR_SET_PDEATHSIG = 1


def main(run_path: str, mode: str, attempt: str, host: str, port: str, start: str) -> None:
    """Schedule every step of one job.

    Args:
        run_path: Run directory.
        mode: `train` or `compare`.
        attempt: Number of this start of the job.
        host: Where rank 0 serves the key-value store.
        port: Its port.
        start: Number of this start of the scheduler within the job's, from 1.
    """
    _die_with_parent()
    run = open_run(run_path)
    config, plan = run.config(), run.plan()
    store = wire.open_store(host, int(port), is_server=False, timeout_s=config.train.timeout_s)
    levels = {f.module: f.level for f in wire.factors_in_force(store).modules}
    service = Scheduler(run, config, plan, mode, int(attempt), int(start), levels)
    try:
        service.serve(store)
    except (RuntimeError, ConnectionError) as error:
        # The key-value store goes away with rank 0: nobody is left to schedule for.
        raise SystemExit(f"scheduler: training has ended ({str(error).splitlines()[0]})") from None
    finally:
        service.close(store)


class Scheduler:
    """State of the scheduler process.

    Args:
        run: Run directory.
        config: Of the run.
        plan: Of the run.
        mode: `train` or `compare`.
        attempt: Number of this start of the job.
        start: Number of this start of the scheduler within it.
        factors: Corrections that an earlier start of the scheduler had found; they go before those of the store.
    """

    def __init__(
        self, run: RunDir, config: Config, plan: Plan, mode: str, attempt: int, start: int = 1,
        factors: dict[str, float] | None = None,
    ) -> None:  # fmt: skip
        self._config, self._plan, self._mode, self._attempt, self._start = config, plan, mode, attempt, start
        self._batches = GlobalBatches(config, run.shapes())
        self._steps = job_steps(config, mode, stage_of_job(config, mode, run.checkpoints))
        self._run_id = run.run_id if mode == TRAIN else f"{run.run_id}/{COMPARE}"
        tables, stored, snapshot = read_costs(config, plan)
        self._cost = CostModel(tables)
        in_force = stored | (factors or {})
        self._corrector = ModuleCorrector({t.module: t.table_id for t in tables}, in_force)
        latest = read_latest(run.checkpoints) if mode == TRAIN else None
        self._first = int(latest["next_step"]) if latest else 0
        cluster = config.cluster.spec()
        self._concurrency = cluster.max_concurrency if cluster.max_concurrency < plan.num_processes else None
        self._effort = Effort() if self._concurrency is None else SHARED_CORES_EFFORT
        self._num_threads = _num_threads(config.train.schedule_ahead)
        self._is_behind = False
        self._shares: dict[int, Mapping[SpanKey, Mapping[str, float]]] = {}
        self._unflushed: list[int] = []
        self.warm_up = _in_thread(warm)
        self._spool = SpoolWriter(config.store, self._run_id, f"{mode}-scheduler-a{attempt}-s{start}")
        self._spool.append(run_input(run.run_id, mode, attempt, snapshot, run.profile_key(), tables))
        known = ", ".join(f"{m} x{f:.2f}" for m, f in sorted(in_force.items())) or "none"
        _say(f"scheduler: cost tables from snapshot {snapshot.seq}, corrections in force: {known}")

    def serve(self, store: Store) -> None:
        """Publish the plan of every step, never more than `schedule_ahead` steps before it is needed."""
        end, ahead = len(self._steps), self._config.train.schedule_ahead
        self._first = step = seen = wire.first_unpublished(store, self._first, end)
        making: deque[Future[PlanMessage]] = deque()
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="plan") as pool:
            while seen < end:
                may_begin = step < end and step - seen <= ahead
                # Caught up: as far ahead as it may be.
                self._is_behind = self._is_behind and (may_begin or bool(making))
                if self._unflushed and wire.wanted_record(store) >= self._unflushed[0]:
                    self._record(store)
                if may_begin and len(making) < self._num_threads and self._is_ready(store, step):
                    making.extend(self._begin(store, step, pool))
                    step += 1
                elif making and making[0].done():
                    self._publish(store, making.popleft().result())
                elif seen < step - len(making) and self._listen(store, seen, step):
                    seen += 1
                else:
                    wait([making[0]], IDLE_S) if making else time.sleep(IDLE_S)

    def close(self, store: Store) -> None:
        """Write what is left, whether or not anybody is there to be told."""
        with contextlib.suppress(RuntimeError, ConnectionError):
            self._record(store)

    def _is_ready(self, store: Store, step: int) -> bool:
        """Whether a plan can be made in full; one that is asked for is made as well as can be. A comparison waits."""
        return self.warm_up.done() or (self._mode == TRAIN and wire.asked_step(store) >= step)

    def _begin(self, store: Store, step: int, pool: ThreadPoolExecutor) -> list[Future[PlanMessage]]:
        """Begin to plan a step, unless that is too late already."""
        spec, is_warm = self._steps[step], self.warm_up.done()
        if wire.is_published(store, step):
            self._fell_behind(step, "it runs another plan already")
            return []
        if not is_warm:
            self._fell_behind(step, "kernels are still being compiled")
        # Rank 0 waits for the first plan of a start. And a comparison is worth nothing with other plans than it names.
        elif self._mode == TRAIN and step > self._first and wire.asked_step(store) >= step:
            self._fell_behind(step, "it is asked for already")
        if self._is_behind and self._mode == TRAIN:
            spec = replace(spec, policy=QUICK, label=QUICK)
        if is_warm:
            self.warm_up.result()  # raises what it raised
        # What a plan depends on is fixed here: corrections that come later count for later steps.
        cost = self._cost.with_corrections(self._corrector.factors)
        compiled = is_warm and IS_COMPILED
        return [pool.submit(self._message, step, spec, self._batches.at(spec.batch_step), cost, compiled)]

    def _message(
        self, step: int, spec: StepSpec, batch: list[SampleShape], cost: CostModel, compiled: bool
    ) -> PlanMessage:
        step_plan = schedule_step(
            run_id=self._run_id,
            step=step,
            plan=self._plan,
            batch=batch,
            cost=cost,
            max_concurrency=self._concurrency,
            policy=spec.policy,
            effort=self._effort,
            compiled=compiled,
        )
        if spec.label:
            step_plan = replace(step_plan, policy=spec.label)
        predicted = predicted_spans(self._plan, step_plan, batch, cost)
        if self._plan.is_inline:
            self._shares[step] = stage_shares(self._plan, predicted)
        return PlanMessage(
            step_plan,
            {
                (*node, s.microbatch): (s.num_items, s.num_tokens, s.sum_sq_tokens, s.forward_s, s.backward_s)
                for node, found in stage_spans(self._plan, predicted).items()
                for s in found
            },
            self._start,
        )

    def _publish(self, store: Store, message: PlanMessage) -> None:
        if not wire.publish(store, message):
            self._shares.pop(message.step_plan.step, None)
            return
        self._spool.append(message.step_plan)
        self._unflushed.append(message.step_plan.step)
        if len(self._unflushed) >= wire.RECORD_EVERY_STEPS:
            self._record(store)

    def _record(self, store: Store) -> None:
        """Write what was published to disk, and tell rank 0 that it need not."""
        self._spool.flush()
        if self._unflushed:
            wire.note_recorded(store, self._start, self._unflushed[-1])
        self._unflushed = []

    def _listen(self, store: Store, seen: int, next_step: int) -> bool:
        """Learn from step `seen` if every rank has observed it; `next_step` is the first not begun yet."""
        found = wire.take_observations(store, seen, self._plan.num_processes)
        if found is None:
            return False
        # What an earlier start planned, or rank 0, is not known here: nothing is learnt from mixed stages then.
        shares = self._shares.pop(seen, {}) if self._plan.is_inline else None
        self._corrector.observe([from_dict(StepObservation, data) for data in found], shares)
        first_affected = min(next_step, len(self._steps))
        corrections = self._corrector.corrections(self._run_id, first_affected, time.time())
        for correction in corrections:
            _say(f"step {seen}: `{correction.module}` takes x{correction.factor:.2f} of its predicted time")
            self._spool.append(correction)
        if corrections:
            wire.note_factors(store, Factors(tuple(ModuleFactors(m, f) for m, f in self._corrector.factors.items())))
        return True

    def _fell_behind(self, step: int, why: str) -> None:
        """Said once; it is over when every step that may be planned is."""
        if self._is_behind:
            return
        self._is_behind = True
        detail = f"step {step} comes too late, {why}; quick plans until the scheduler has caught up"
        _say(f"scheduler: {detail}")
        self._spool.append(
            RunEvent(self._run_id, self._mode, self._attempt, step, "scheduler_behind", detail, time.time())
        )


def _in_thread(work: Callable[[], None]) -> Future[None]:
    """What becomes of work in a thread that does not keep the process alive."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="compile", daemon=True).start()
    return future


def _num_threads(ahead: int) -> int:
    """Plans made at once: as many as this process may use cores that ranks beside it leave free."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min(ahead, num_cores - num_ranks))


def _die_with_parent() -> None:
    """End on SIGTERM by way of `finally`, so that the spool is flushed, and get one when rank 0 dies."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except DflopError as error:
        raise SystemExit(f"scheduler: {error}") from None
