"""The scheduler process of a training job: cost tables in, StepPlans out, corrections back.

It runs beside the ranks, some steps ahead of them. It reads cost tables and corrections from a snapshot of the store
once, packs each global batch, publishes the StepPlan on the job's key-value store, learns from what the ranks measured
(`dflop/learn`), and spools what it learns. What other runs learn meanwhile counts from its next start on. While its
kernels are compiled rank 0 makes quick plans; when it falls behind it makes quick ones itself until it has caught up.
When it dies, rank 0 makes quick plans and starts it again.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

from dflop.config import Config
from dflop.cost.model import CostModel
from dflop.errors import DflopError
from dflop.jobs.spool_writer import SpoolThread
from dflop.jobs.supervisor import die_with_parent
from dflop.learn.cost_inputs import read_costs, run_input
from dflop.learn.decisions import JobFacts
from dflop.learn.learner import Learner, Row
from dflop.records import Decision, Factors, Plan, RunEvent, SampleShape, to_dict
from dflop.run.batches import COMPARE, QUICK, TRAIN, GlobalBatches, StepSpec, job_steps, stage_of_job
from dflop.run.directory import RunDir, open_run
from dflop.run.messages import say
from dflop.run.plan_scope import basis_of, factors_text, scenario_batches
from dflop.schedule.policies import Effort
from dflop.schedule.step_scheduler import predicted_spans, schedule_step, warm
from dflop.store.spool import SpoolWriter
from dflop.train import wire
from dflop.train.wire import PlanMessage, Store

IDLE_S = 0.02
SHARED_CORES_EFFORT = Effort(max_simulations=10_000)
"""Where ranks compute on all cores and every second of the search is one of theirs: a fraction of the time, and all but
half a percent of the gain."""
NUM_USUAL = 32
"""Batches of a plan's steps from which what is usual is known: those few that it was ranked on say little of how much
batches differ."""
NOTE_EVERY_STEPS = 10
"""What is learnt is noted for a later start, where there was nothing to tell of it in between."""


def main(run_path: str, mode: str, attempt: str, host: str, port: str, start: str) -> None:
    """Schedule every step of the `train` or `compare` job of a run directory.

    `attempt` numbers the job's starts, `start` those of the scheduler within it, from 1; rank 0 serves the key-value
    store at host and port.
    """
    die_with_parent()
    run = open_run(run_path)
    config, plan = run.config(), run.plan()
    store = wire.open_store(host, int(port), is_server=False, timeout_s=config.train.timeout_s)
    service = Scheduler(
        run, config, plan, mode, int(attempt), int(start), wire.noted(store, wire.LEARNED, {}),
        lambda rank: str(wire.noted(store, wire.HOST.format(rank), "")),
    )  # fmt: skip
    try:
        service.serve(store)
    except (RuntimeError, ConnectionError) as error:
        # The key-value store goes away with rank 0: nobody is left to schedule for.
        raise SystemExit(f"scheduler: training ended ({str(error).splitlines()[0]})") from None
    finally:
        service.close()


class Scheduler:
    """State of the scheduler process; its arguments are those of `main`.

    What an earlier start had `learned` goes before what the store knows; `host_of` names the machine of a rank.
    """

    def __init__(
        self, run: RunDir, config: Config, plan: Plan, mode: str, attempt: int, start: int = 1,
        learned: Mapping[str, Any] | None = None, host_of: Callable[[int], str] = lambda rank: "",
    ) -> None:  # fmt: skip
        self._config, self._plan, self._mode, self._attempt = config, plan, mode, attempt
        shapes = run.shapes()
        self._batches = GlobalBatches(config, shapes)
        self._first = run.next_step() if mode == TRAIN else 0
        self._steps = job_steps(config, mode, stage_of_job(config, mode, self._first))
        self._run_id = run.run_id if mode == TRAIN else f"{run.run_id}/{COMPARE}"
        tables, earlier, snapshot = read_costs(config, plan)
        self._cost = CostModel(tables)
        cluster = config.cluster.spec()
        self._concurrency = cluster.max_concurrency if cluster.max_concurrency < plan.num_processes else None
        self._effort = Effort() if self._concurrency is None else SHARED_CORES_EFFORT
        self._num_threads = max(1, min(config.train.schedule_ahead, _num_free_cores()))
        self._is_behind = False
        basis = basis_of(run)
        ids, num_steps = {t.module: t.table_id for t in self._cost.tables}, len(self._steps)
        facts = JobFacts(self._run_id, attempt, plan, ids, num_steps, host_of, self._cost, self._concurrency)
        planned = basis.from_step, basis.num_steps
        usual = scenario_batches(config, shapes, *planned, NUM_USUAL) if mode == TRAIN else ()
        self._learner = Learner(
            config, facts, shapes, first_step=self._first, earlier=earlier, learned=learned, usual=usual
        )
        self._noted: Factors | None = None
        # A thread that keeps no process alive. What it raises stands in the log, and is raised again by the first plan.
        self.warm_up = threading.Thread(target=warm, name="compile", daemon=True)
        self.warm_up.start()
        writer = SpoolWriter(config.store, self._run_id, f"{mode}-scheduler-a{attempt}-s{start}")
        self._spool = SpoolThread(writer, "the scheduler's rows")
        self._spool.put(run_input(run.run_id, mode, attempt, snapshot, run.profile_key(), tables))
        known = factors_text(self._learner.factors.by_module()) or "No corrections are active."
        say(f"scheduler: cost tables from snapshot {snapshot.seq}. {known}")

    def serve(self, store: Store) -> None:
        """Publish the plan of every step, never more than `schedule_ahead` steps before it is needed."""
        end, ahead = len(self._steps), self._config.train.schedule_ahead
        self._note_factors(store)  # of earlier runs: a fallback schedule of the first steps counts on them, too
        self._first = step = seen = wire.first_unpublished(store, self._first, end)
        making: deque[Future[PlanMessage]] = deque()
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="plan") as pool:
            while seen < end:
                may_begin = step < end and step - seen <= ahead
                # Caught up: as far ahead as it may be.
                self._is_behind = self._is_behind and (may_begin or bool(making))
                if may_begin and len(making) < self._num_threads and not self.warm_up.is_alive():
                    making.extend(self._begin(store, step, pool))
                    step += 1
                elif making and making[0].done():
                    message = making.popleft().result()
                    if not wire.publish(store, message):
                        self._learn_from_others(store, message.step_plan.step)
                elif seen < step - len(making) and self._listen(store, seen, step):
                    seen += 1
                else:
                    wait([making[0]], IDLE_S) if making else time.sleep(IDLE_S)

    def close(self) -> None:
        """Write what is left."""
        self._tell(self._learner.close(len(self._steps), time.time()))
        self._spool.close()

    def _begin(self, store: Store, step: int, pool: ThreadPoolExecutor) -> list[Future[PlanMessage]]:
        """Begin to plan a step, unless that is too late already."""
        spec = self._steps[step]
        if wire.is_published(store, step):
            self._fell_behind(step, "it already runs another plan")
            self._learn_from_others(store, step)
            return []
        # Rank 0 waits for the first plan of a start. And a comparison is worth nothing with other plans than it names.
        if self._mode == TRAIN and step > self._first and wire.noted(store, wire.ASKED, -1) >= step:
            self._fell_behind(step, "already requested")
        if self._is_behind and self._mode == TRAIN:
            spec = replace(spec, policy=QUICK, label=QUICK)
        # What a plan depends on is fixed here: corrections that come later count for later steps.
        factors = self._learner.factors
        return [pool.submit(self._message, step, spec, self._batches.at(spec.batch_step), factors)]

    def _message(self, step: int, spec: StepSpec, batch: list[SampleShape], factors: Factors) -> PlanMessage:
        cost, slowness = self._cost.with_corrections(factors.by_module()), factors.by_node()
        step_plan = schedule_step(
            run_id=self._run_id, step=step, plan=self._plan, batch=batch, cost=cost, policy=spec.policy,
            max_concurrency=self._concurrency, effort=self._effort, slowness=slowness,
        )  # fmt: skip
        if spec.label:
            step_plan = replace(step_plan, policy=spec.label)
        self._learner.prepare(step, step_plan, batch)
        return PlanMessage.of(step_plan, predicted_spans(self._plan, step_plan, batch, cost, slowness))

    def _learn_from_others(self, store: Store, step: int) -> None:
        """A plan that rank 0 has made itself says as much about costs as one of ours."""
        self._learner.forget(step)
        if (message := wire.published(store, step)) is not None:
            batch = self._batches.at(self._steps[step].batch_step)
            self._learner.prepare(step, message.step_plan, batch)

    def _listen(self, store: Store, seen: int, next_step: int) -> bool:
        """Learn from step `seen` if every rank has observed it; `next_step` is the first not begun yet."""
        found = wire.take_times(store, seen, self._plan.num_processes)
        if found is None:
            return False
        rows = self._learner.observe(seen, found, min(next_step, len(self._steps)), time.time())
        self._tell(rows)
        if ratio := self._learner.newly_busy():
            detail = f"forward and backward take {ratio:.2f}x their processor time: other programs use the cores"
            self._event(seen, "machine_busy", detail)
        self._note_factors(store)
        if rows or seen % NOTE_EVERY_STEPS == 0:
            wire.note(store, wire.LEARNED, self._learner.state())
        return True

    def _note_factors(self, store: Store) -> None:
        factors = self._learner.factors
        if factors != self._noted:
            wire.note(store, wire.FACTORS, to_dict(factors))
            self._noted = factors

    def _tell(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._spool.put(row)
            if isinstance(row, Decision):
                say(f"step {row.step}: {row.detail}")
                self._spool.flush()  # the driver may have to act on it

    def _fell_behind(self, step: int, why: str) -> None:
        """Said once; it is over when every step that may be planned is."""
        if self._is_behind:
            return
        self._is_behind = True
        detail = f"missed by the scheduler, {why}; using the fallback schedule until it has caught up"
        self._event(step, "scheduler_behind", detail)

    def _event(self, step: int, kind: str, detail: str) -> None:
        say(f"scheduler: step {step}: {detail}")
        self._spool.put(RunEvent(self._run_id, self._mode, self._attempt, step, kind, detail, time.time()))


def _num_free_cores() -> int:
    """Cores of this process that ranks of the same machine do not take; may be less than 1."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return num_cores - num_ranks


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except DflopError as error:
        raise SystemExit(f"scheduler: {error}") from None
