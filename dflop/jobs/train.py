"""The process of one rank of a training job, or of the comparison, which is training with both policies in turn.

Started once per process with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set: by the launcher, or
by torchrun. Everything else comes from the run directory.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch.distributed as dist

from dflop.config import Config
from dflop.errors import ConfigError, DflopError, Interrupted, LaunchError, did_you_mean
from dflop.jobs.curves import check_trackers
from dflop.jobs.rank import Rank
from dflop.jobs.rank_setup import join, take_device
from dflop.jobs.supervisor import Supervisor
from dflop.launch.payload import note_stop
from dflop.models.weights import hf_types
from dflop.run.batches import COMPARE, TRAIN, job_steps, stage_of_job
from dflop.run.directory import RunDir, family_of, open_run
from dflop.run.messages import say
from dflop.run.training_claim import TrainingClaim
from dflop.train import wire
from dflop.train.manifest import read_latest
from dflop.train.signals import StopRequest, leave, leave_at_exit
from dflop.train.wire import Store


def preload(run_path: str, _mode: str) -> None:
    """Import what every rank of the run imports."""
    family = family_of(open_run(run_path).config())
    hf_types(family, family.hf_config)  # some seconds of processor time


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
    agreed = [(begun.attempt, begun.store.port, begun.next_step) if begun else (0, 0, 0)]
    dist.broadcast_object_list(agreed, src=0)
    (attempt, port, next_step), host = agreed[0], wire.master_host(os.environ)
    store = begun.store if begun else wire.open_store(host, port, is_server=False, timeout_s=timeout_s)
    rank0 = (begun.supervisor, begun.claim) if begun else ()
    rank = Rank(run, config, plan, mode, stage_of_job(config, mode, next_step), attempt, device, store, stop, *rank0)
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
        leave(stopped.exit_code)
    except BaseException as error:
        rank.watch.report(error)
        rank.close(at_once=True)
        if begun:
            begun.claim.release()
        leave_at_exit(error.exit_code if isinstance(error, DflopError) else 1)
        raise
    rank.leave(at_once=rank.has_stopped_early)
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
    next_step: int
    """First step that the newest checkpoint does not hold; 0 in a comparison, which always starts over."""


def _begin(run: RunDir, mode: str, config: Config) -> _Begun:
    """Serve the key-value store and start the scheduler process of a `train` or `compare` job."""
    try:
        claim = TrainingClaim(run, mode, say)
    except LaunchError as refused:
        say(f"{mode}: {refused}")  # first, and without a traceback, in the log of a job that somebody started by hand
        raise
    host, attempt = wire.master_host(os.environ), claim.attempt
    store = wire.open_store(host, 0, is_server=True, timeout_s=config.train.timeout_s)
    latest = (read_latest(run.checkpoints) if mode == TRAIN else None) or {"next_step": 0}
    next_step = int(latest["next_step"])
    num_steps = len(job_steps(config, mode, stage_of_job(config, mode, next_step)))
    # What the job had learnt before it was ended may not be in the snapshot that the scheduler reads.
    wire.note(store, wire.LEARNED, latest.get("learned", {}))
    log = run.path / "log" / f"scheduler-{mode}-{attempt}.log"
    log.parent.mkdir(exist_ok=True)
    say(f"scheduler starts, log in {log}")
    supervisor = Supervisor(
        [str(run.path), mode, str(attempt), host, str(store.port)], log,
        num_steps=num_steps, max_restarts=config.train.scheduler_restarts,
    )  # fmt: skip
    return _Begun(claim, attempt, store, supervisor, next_step)


if __name__ == "__main__":
    try:
        main(sys.argv[1], *(sys.argv[2:] or [TRAIN]))
    except DflopError as error:
        say(f"train: {error}")
        raise SystemExit(error.exit_code) from None
