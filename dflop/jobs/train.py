"""One rank of a training job; also of the comparison, which is training with both policies in turn.

Started once per process with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set: by the launcher, or
by torchrun. Everything else comes from the run directory.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import time
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from dflop.config import Config, TrainConfig
from dflop.errors import ConfigError, DflopError, Interrupted, LaunchError, TrainError, did_you_mean
from dflop.jobs.curves import check_trackers
from dflop.jobs.fallback_plan import QuickPlanner
from dflop.jobs.rank_setup import join, peak_memory, take_device
from dflop.jobs.rank_trainer import make_trainer
from dflop.jobs.spool_writer import SpoolThread
from dflop.jobs.supervisor import Supervisor
from dflop.jobs.telemetry import SpeedCounter, Telemetry
from dflop.launch.payload import note_stop
from dflop.models.build import import_model
from dflop.parallel.topology import seat_of, seats
from dflop.records import Plan, QuarantinedSample, RunEvent, StepObservation
from dflop.run.batches import COMPARE, TRAIN, GlobalBatches, Stage, job_steps, stage_of_job, stages_of
from dflop.run.directory import RunDir, family_of, open_run, tokenizer_of
from dflop.run.messages import say
from dflop.run.training_claim import TrainingClaim
from dflop.store.spool import SpoolWriter
from dflop.train import wire
from dflop.train.liveness import Activities
from dflop.train.loop import Hooks, LoopSettings
from dflop.train.manifest import read_latest
from dflop.train.plan_source import Guard, Patience, PlanSource
from dflop.train.signals import StopRequest, leave, leave_at_exit
from dflop.train.watchdog import Watch
from dflop.train.wire import RankTimes, Store
from dflop.units import seconds

START_PATIENCE_S = 10.0
"""For the first plan. The scheduler had the time in which the ranks loaded the model: little, if it is a small one."""
COMPARE_PATIENCE_S = 60.0
"""In a comparison, which is worth nothing with other plans than it names."""


def preload(run_path: str, _mode: str) -> None:
    """Import what every rank of the run imports."""
    import_model(family_of(open_run(run_path).config()))


def main(run_path: str, mode: str) -> dict[str, float]:
    """Run this rank to the end of the job; returns the first step run by this start and how many the job has.

    `train` resumes from the newest checkpoint, `compare` starts from scratch.

    Raises:
        ConfigError: no such run or mode, or not as many processes as the plan has.
        LaunchError: another job trains the run.
        TrainError: training stopped.

    Told to stop by SIGUSR2 or SIGTERM, every rank ends its process with exit code 75, a checkpoint behind it; rank 0
    leaves a line for the batch script, which starts the job again (`launch/payload.py`).
    """
    stop = StopRequest()
    stop.listen()
    if mode not in (TRAIN, COMPARE):
        raise ConfigError(f"unknown mode `{mode}`", hint=did_you_mean(mode, (TRAIN, COMPARE)))
    run = open_run(run_path)
    config, plan = run.config(), run.plan()
    num_ranks, timeout_s = int(os.environ["WORLD_SIZE"]), config.train.timeout_s
    if num_ranks != plan.num_processes:
        raise ConfigError(
            f"the job has {num_ranks} processes, the plan needs {plan.num_processes}",
            where=str(run.path / "plan.json"),
            hint="start as many tasks as the plan has processes",
        )
    check_trackers(config, f"{run.config_file}: train.report_to")
    # Before the ranks find each other and load the model, so that the scheduler is ready when they are.
    begun = _begin(run, mode, config) if os.environ["RANK"] == "0" else None
    device = take_device(config)
    join(config.cluster.collectives, timeout_s)
    agreed = [(begun.attempt, begun.store.port, begun.stage.index) if begun else (0, 0, 0)]
    dist.broadcast_object_list(agreed, src=0)
    attempt, port, number = agreed[0]
    store = (
        begun.store
        if begun
        else wire.open_store(wire.master_host(os.environ), port, is_server=False, timeout_s=timeout_s)
    )
    stage = stages_of(config)[number]
    rank = _Rank(run, config, plan, mode, stage, attempt, device, store, begun, stop)
    try:
        first = rank.train()
    except Interrupted as stopped:
        if begun:
            what_next = "resumes from there" if mode == TRAIN else "starts from scratch"
            say(f"train: {stopped.what}; started again, the job {what_next}")
            # Not where it went back to an earlier stage: that wants another plan before anything starts again.
            now = run.next_step() if mode == TRAIN else 0
            if now >= begun.next_step:
                try:
                    note_stop(begun.next_step, now)
                except OSError as error:  # a full disk: nobody starts the job again by itself
                    say(f"cannot report the job's progress to the batch script: {error}")
        rank.leave(at_once=True)
        rank.release()
        leave(stopped.exit_code)
    except BaseException as error:
        rank.watch.report(error)
        rank.close(at_once=True)
        rank.release()
        leave_at_exit(error.exit_code if isinstance(error, DflopError) else 1)
        raise
    rank.leave(at_once=False)
    rank.release()
    stop.ignore()
    dist.destroy_process_group()
    if rank.telemetry.curves is not None and rank.telemetry.curves.has_dropped:
        leave_at_exit(0)  # the interpreter would wait for clients of a server that does not answer
    return {"first_step": first, "num_steps": len(rank.steps)}


@dataclass(frozen=True, slots=True)
class _Begun:
    """What rank 0 begins before it knows the others: the run's claim, the key-value store, the scheduler process."""

    claim: TrainingClaim
    attempt: int
    store: Store
    supervisor: Supervisor
    stage: Stage
    """Of training."""
    next_step: int
    """That the newest checkpoint does not hold; 0 in a comparison, which always starts over."""


def _begin(run: RunDir, mode: str, config: Config) -> _Begun:
    """Serve the key-value store and start the scheduler process of a `train` or `compare` job."""
    try:
        claim = TrainingClaim(run, mode, say)
    except LaunchError as refused:
        say(f"{mode}: {refused}")  # first, and without a traceback, in the log of a job that somebody started by hand
        raise
    host, attempt = wire.master_host(os.environ), run.claim_attempt(mode)
    store = wire.open_store(host, 0, is_server=True, timeout_s=config.train.timeout_s)
    latest = (read_latest(run.checkpoints) if mode == TRAIN else None) or {"next_step": 0}
    stage = stage_of_job(config, mode, int(latest["next_step"]))
    # What the job had learnt before it was ended may not be in the snapshot that the scheduler reads.
    wire.note(store, wire.LEARNED, latest.get("learned", {}))
    log = run.path / "log" / f"scheduler-{mode}-{attempt}.log"
    log.parent.mkdir(exist_ok=True)
    say(f"scheduler starts, log in {log}")
    supervisor = Supervisor(
        [str(run.path), mode, str(attempt), host, str(store.port)], log,
        num_steps=len(job_steps(config, mode, stage)), max_restarts=config.train.scheduler_restarts,
    )  # fmt: skip
    return _Begun(claim, attempt, store, supervisor, stage, int(latest["next_step"]))


class _Rank:
    """What one rank of the job is made of."""

    def __init__(
        self, run: RunDir, config: Config, plan: Plan, mode: str, stage: Stage, attempt: int, device: torch.device,
        store: Store, begun: _Begun | None, stop: StopRequest,
    ) -> None:  # fmt: skip
        self.run, self.config, self.plan, self.mode, self.attempt = run, config, plan, mode, attempt
        self.stage, self.device, self.store, self.stop = stage, device, store, stop
        self.supervisor = begun.supervisor if begun else None
        self.claim = begun.claim if begun else None
        self.seat = seat_of(plan, dist.get_rank())
        self.shapes = run.shapes()
        self.batches = GlobalBatches(config, self.shapes)
        self.steps = job_steps(config, mode, stage)
        self.run_id = run.run_id if mode == TRAIN else f"{run.run_id}/{COMPARE}"
        producer = f"{mode}-r{self.seat.rank}-a{attempt}"
        self.spool = SpoolThread(SpoolWriter(config.store, self.run_id, producer))
        self.telemetry = Telemetry(
            run, config, self.seat, self.run_id, attempt, self.spool, functools.partial(peak_memory, device)
        )
        self.plans = self._plans()
        self.activities = Activities()
        self.watch = Watch(
            store,
            self.seat.rank,
            [f"rank {s.rank} ({s.module} stage {s.stage} replica {s.dp_rank})" for s in seats(plan)],
            self.activities,
            stall_s=config.train.stall_s or 0.75 * config.train.timeout_s,
            on_end=lambda: self.close(at_once=True),
        )
        wire.note(store, wire.HOST.format(self.seat.rank), socket.gethostname())
        self.watch.start()

    def leave(self, *, at_once: bool) -> None:
        """End together with all other ranks: the first process that is gone ends a job, and rank 0 serves the store."""
        self.watch.close()
        self.close(at_once=at_once)
        dist.barrier()

    def close(self, *, at_once: bool) -> None:
        """Write what is left. A scheduler whose job ends early waits for observations that never come."""
        if self.supervisor is not None:
            self.supervisor.stop(at_once=at_once)
        self.telemetry.close()
        self.spool.close()

    def release(self) -> None:
        """Let another job train the run; call it when nothing is left to write."""
        if self.claim is not None:
            self.claim.release()

    def train(self) -> int:
        """Train to the last step; returns the first one that was run."""
        tokenizer = tokenizer_of(self.config)
        family = family_of(self.config, tokenizer.vocab_size)
        if self.supervisor is not None:
            num_devices, frozen = self.plan.num_processes / self.config.cluster.ranks_per_gpu, self.stage.frozen
            self.telemetry.count_speed(SpeedCounter(self.config, family, self.batches, self.steps, num_devices, frozen))
        same = {field.name for field in fields(LoopSettings)} & TrainConfig.model_fields.keys()
        settings = LoopSettings(
            **self.config.train.model_dump(include=same - {"num_steps", "learning_rate"}),
            run_id=self.run_id,
            attempt=self.attempt,
            num_steps=len(self.steps),
            learning_rate=self.stage.learning_rate,
            first_step=self.stage.first_step if self.mode == TRAIN else 0,
        )
        hooks = Hooks(
            self._observed, self._bad_sample, self._before_checkpoint, self._checkpoint_meta,
            self.stop.is_set, on_fall_back=self._fell_back, on_spans=self.telemetry.traced,
            on_skipped_step=self._skipped_step,
        )  # fmt: skip
        return make_trainer(
            self.config, self.plan, self.seat, self.device, family, tokenizer, self.shapes, frozen=self.stage.frozen,
            settings=settings, plans=self.plans, hooks=hooks, activities=self.activities,
            checkpoints=self.run.checkpoints if self.mode == TRAIN else None, on_failed_checkpoint=self._not_saved,
        ).run()  # fmt: skip

    def _plans(self) -> PlanSource:
        timeout_s = self.config.train.timeout_s
        if self.supervisor is None:
            return PlanSource(self.store, self.seat.rank, timeout_s=timeout_s)
        patience = Patience(min(START_PATIENCE_S, timeout_s / 2), self.config.train.schedule_patience_frac)
        if self.mode == COMPARE:
            patience = Patience(min(COMPARE_PATIENCE_S, timeout_s / 2), None)
        quick = QuickPlanner(
            self.run, self.config, self.plan, self.mode, self.run_id, self.batches, self.store,
            on_exceeded=lambda step, fill: self._event(step, "memory_exceeded", f"the fallback schedule puts {fill}"),
        )  # fmt: skip
        guard = Guard(quick, self.supervisor.is_alive, patience, self._scheduler_is_late, self.spool.put)
        return PlanSource(self.store, self.seat.rank, timeout_s=timeout_s, guard=guard)

    def _scheduler_is_late(self, step: int, waited_s: float) -> None:
        self._event(step, "scheduler_late", f"not ready after {seconds(waited_s)}; using the fallback schedule")

    def _event(self, step: int, kind: str, detail: str) -> None:
        say(f"step {step}: {kind.replace('_', ' ')}: {detail}")
        if kind.startswith("scheduler_"):
            self.telemetry.scheduler_event()
        self.spool.put(RunEvent(self.run_id, self.mode, self.attempt, step, kind, detail, time.time()))

    def _not_saved(self, error: TrainError) -> None:
        """Of every rank, the thread that writes calls this; one of them is enough for the store."""
        self.activities.note(error)
        if self.seat.rank == 0:
            self._event(self.activities.main.step, "checkpoint_failed", str(error))
        else:
            say(str(error))

    def _fell_back(self, next_step: int, newer: str) -> None:
        if self.seat.rank == 0:
            self._event(next_step, "checkpoint_damaged", f"{newer}; using the one before it")

    def _skipped_step(self, step: int, reason: str) -> None:
        if self.seat.rank == 0:
            self._event(step, "not_finite", reason)

    def _observed(self, seen: StepObservation) -> None:
        line = self.telemetry.observed(seen)
        wire.send_times(self.store, RankTimes.of(seen))
        if self.supervisor is not None:
            say(f"step {seen.step}  {seen.step + 1}/{len(self.steps)} done  {line}")
            # A signal to all processes of the job has ended it, too.
            if not self.stop.is_set():
                self.supervisor.tend(seen.step, self._event)

    def _before_checkpoint(self, _next_step: int) -> None:
        if self.claim is not None:
            self.claim.check()
        self.spool.flush()

    def _checkpoint_meta(self) -> dict[str, Any]:
        return {"seed": self.config.train.seed, "learned": wire.noted(self.store, wire.LEARNED, {})}

    def _bad_sample(self, step: int, sample_index: int, path: str, reason: str) -> None:
        shape = next(s for s in self.shapes if s.sample_index == sample_index)
        key, sample_id = shape.profile_key, shape.sample_id
        say(f"step {step}: sample `{sample_id}` carries no loss: {path}: {reason}")
        self.telemetry.skipped_sample()
        self.spool.put(QuarantinedSample(key, sample_index, sample_id, "train", path, reason, self.run_id, step))


if __name__ == "__main__":
    try:
        main(sys.argv[1], *(sys.argv[2:] or [TRAIN]))
    except DflopError as error:
        say(f"train: {error}")
        raise SystemExit(error.exit_code) from None
