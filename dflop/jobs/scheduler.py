"""The scheduler process of a training job: cost tables in, StepPlans out, corrections back.

It runs beside the ranks, some steps ahead of them. It reads the cost tables from a snapshot of the store once, packs
each global batch, publishes the StepPlan on the job's key-value store, listens to what the ranks measured, and spools
plans and corrections. Nothing waits for it for long: when it is late or dead, rank 0 goes on in arrival order.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import time
from dataclasses import replace

import torch.distributed as dist

from dflop.config import Config
from dflop.correct.estimate import ModuleCorrector
from dflop.cost.model import CostModel
from dflop.errors import DflopError, StoreError
from dflop.jobs.inputs import run_input
from dflop.jobs.rundir import RunDir, open_run
from dflop.jobs.steps import COMPARE, TRAIN, GlobalBatches, StepSpec, job_steps
from dflop.records import CostTable, Plan, StepObservation, from_dict
from dflop.schedule.scheduler import predicted_spans, schedule_step
from dflop.store.reader import Reader
from dflop.store.snapshot import Current
from dflop.store.spool import SpoolWriter
from dflop.train.checkpoint import read_latest
from dflop.train.plans import PlanMessage, open_store, publish, take_observation

IDLE_S = 0.02
_PR_SET_PDEATHSIG = 1


def main(run_path: str, mode: str, attempt: str, host: str, port: str) -> None:
    """Schedule every step of one job.

    Args:
        run_path: Run directory.
        mode: `train` or `compare`.
        attempt: Number of this start of the job.
        host: Where rank 0 serves the key-value store.
        port: Its port.
    """
    _die_with_parent()
    run = open_run(run_path)
    config, plan = run.config(), run.plan()
    service = Scheduler(run, config, plan, mode, int(attempt))
    store = open_store(host, int(port), is_server=False, timeout_s=config.train.timeout_s)
    try:
        service.serve(store)
    except (RuntimeError, ConnectionError) as error:
        # The key-value store goes away with rank 0: nobody is left to schedule for.
        raise SystemExit(f"scheduler: training has ended ({str(error).splitlines()[0]})") from None
    finally:
        service.close()


class Scheduler:
    """State of the scheduler process."""

    def __init__(self, run: RunDir, config: Config, plan: Plan, mode: str, attempt: int) -> None:
        self._config, self._plan, self._mode = config, plan, mode
        self._batches = GlobalBatches(config, run.shapes())
        self._steps = job_steps(config, mode)
        self._run_id = run.run_id if mode == TRAIN else f"{run.run_id}/{COMPARE}"
        tables, factors, snapshot = _read_costs(config, plan)
        self._cost = CostModel(tables)
        self._corrector = ModuleCorrector({t.module: t.table_id for t in tables}, factors)
        latest = read_latest(run.checkpoints) if mode == TRAIN else None
        self._first = int(latest["next_step"]) if latest else 0
        cluster = config.cluster.spec()
        self._concurrency = cluster.max_concurrency if cluster.max_concurrency < plan.num_processes else None
        self._spool = SpoolWriter(config.store, self._run_id, f"{mode}-scheduler-a{attempt}")
        self._spool.append(run_input(run.run_id, mode, int(attempt), snapshot, run.profile_key(), tables))
        known = ", ".join(f"{m} x{f:.2f}" for m, f in sorted(factors.items())) or "none"
        _say(f"scheduler: cost tables from snapshot {snapshot.seq}, corrections in force: {known}")

    def serve(self, store: dist.TCPStore) -> None:
        """Publish the plan of every step, never more than `schedule_ahead` steps before it is needed."""
        seen = self._first
        pending: dict[int, dict[int, StepObservation]] = {}
        for step in range(self._first, len(self._steps)):
            while step - seen >= self._config.train.schedule_ahead + 1:
                seen = self._listen(store, seen, pending)
            message = self._message(step, self._steps[step])
            if publish(store, message):
                self._spool.append(message.step_plan)
        while seen < len(self._steps):
            seen = self._listen(store, seen, pending)

    def close(self) -> None:
        self._spool.close()

    def _message(self, step: int, spec: StepSpec) -> PlanMessage:
        batch = self._batches.at(spec.batch_step)
        cost = self._cost.with_corrections(self._corrector.factors)
        step_plan = schedule_step(
            run_id=self._run_id,
            step=step,
            plan=self._plan,
            batch=batch,
            cost=cost,
            max_concurrency=self._concurrency,
            policy=spec.policy,
        )
        if spec.label:
            step_plan = replace(step_plan, policy=spec.label)
        spans = predicted_spans(self._plan, step_plan, batch, cost)
        return PlanMessage(
            step_plan,
            {
                (*node, s.microbatch): (s.num_items, s.num_tokens, s.sum_sq_tokens, s.forward_s, s.backward_s)
                for node, found in spans.items()
                for s in found
            },
        )

    def _listen(self, store: dist.TCPStore, seen: int, pending: dict[int, dict[int, StepObservation]]) -> int:
        """Take what has arrived of step `seen`; returns the first step that is not complete yet."""
        found = pending.setdefault(seen, {})
        for rank in range(self._plan.num_processes):
            if rank in found:
                continue
            data = take_observation(store, seen, rank)
            if data is not None:
                found[rank] = from_dict(StepObservation, data)
        if len(found) < self._plan.num_processes:
            time.sleep(IDLE_S)
            return seen
        self._corrector.observe(list(pending.pop(seen).values()))
        # Plans up to seen + schedule_ahead are out already; the next one made is the first to use a new factor.
        first_affected = min(seen + 1 + self._config.train.schedule_ahead, len(self._steps))
        for correction in self._corrector.corrections(self._run_id, first_affected, time.time()):
            _say(f"step {seen}: `{correction.module}` takes x{correction.factor:.2f} of its predicted time")
            self._spool.append(correction)
        return seen + 1


def _die_with_parent() -> None:
    """End on SIGTERM by way of `finally`, so that the spool is flushed, and get one when rank 0 dies."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _read_costs(config: Config, plan: Plan) -> tuple[list[CostTable], dict[str, float], Current]:
    with Reader(config.store) as reader:
        found = {t.table_id: t for t in reader.records(CostTable, where={"table_id": plan.table_ids})}
        missing = [i for i in plan.table_ids if i not in found]
        if missing:
            raise StoreError(
                f"cost tables {', '.join(missing)} of the plan are not in the snapshot",
                where=f"{config.store}, snapshot {reader.seq}",
                hint="run `dflop store ingest`",
            )
        tables = list(found.values())
        factors = {c.module: c.factor for c in reader.latest_corrections(plan.table_ids)}
        return tables, factors, reader.snapshot


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except DflopError as error:
        raise SystemExit(f"scheduler: {error}") from None
