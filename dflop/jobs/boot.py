"""What rank 0 of a training job begins before it knows the others: the key-value store and the scheduler process."""

from __future__ import annotations

import os
from dataclasses import dataclass

from dflop.config import Config
from dflop.jobs.supervisor import Supervisor
from dflop.run.batches import TRAIN, Stage, job_steps, stage_of_job
from dflop.run.directory import RunDir
from dflop.run.messages import say
from dflop.train import wire
from dflop.train.manifest import read_latest
from dflop.train.wire import Store


@dataclass(frozen=True, slots=True)
class Begun:
    """What rank 0 has begun."""

    attempt: int
    store: Store
    supervisor: Supervisor
    stage: Stage
    """Of training."""
    next_step: int
    """That the newest checkpoint does not hold; 0 in a comparison, which always starts over."""


def begin(run: RunDir, mode: str, config: Config) -> Begun:
    """Serve the key-value store and start the scheduler process of a `train` or `compare` job."""
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
    return Begun(attempt, store, supervisor, stage, int(latest["next_step"]))
