"""Entry of ranks whose scheduler meets with an accident: `python -m tests.jobs.disturbed ACCIDENT RUN_DIR`.

    killed   dies of SIGKILL twice, the second time just after its restart; rank 0 waits for what its third start plans
    dying    ends as soon as it starts, every time
    mute     lives and publishes nothing
    slow     plans in full too late for the first steps; rank 0 waits until it has begun, and later for it to get ahead

Rank 0 waits on the key-value store, between two steps, where training would otherwise be over before a process starts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from datetime import timedelta
from typing import Any

from dflop.jobs import supervisor, train
from dflop.jobs.steps import TRAIN
from dflop.records import StepObservation
from dflop.train.wire import open_store, plan_key

LIMIT_S = 120
BEGINS = "test/scheduler_begins"


def kill(rank: Any) -> None:
    os.kill(rank.supervisor.pid, signal.SIGKILL)
    wait_for_death(rank)


def wait_for_death(rank: Any) -> None:
    with contextlib.suppress(ChildProcessError):  # waited for before
        os.waitid(os.P_PID, rank.supervisor.pid, os.WEXITED | os.WNOWAIT)


def wait_for(rank: Any, key: str) -> None:
    own = open_store(rank.store.host, rank.store.port, is_server=False, timeout_s=LIMIT_S)
    own.wait([key], timedelta(seconds=LIMIT_S))


def before(accident: str, rank: Any, step: int) -> None:
    """Before the scheduler hears of a step and is looked after."""
    if accident == "killed" and step == 3:
        kill(rank)
    if accident == "dying":
        wait_for_death(rank)


def after(accident: str, rank: Any, step: int) -> None:
    if accident == "killed" and step == 4:
        kill(rank)
    if accident == "killed" and step == 9:
        wait_for(rank, plan_key(13))
    if accident == "slow" and step == 0:
        wait_for(rank, BEGINS)
    if accident == "slow" and step == 8:
        wait_for(rank, plan_key(11))


def main(accident: str, run_path: str) -> None:
    observed = train._Rank._observed

    def disturbed(rank: Any, seen: StepObservation) -> None:
        if rank.supervisor is not None:
            before(accident, rank, seen.step)
        observed(rank, seen)
        if rank.supervisor is not None:
            after(accident, rank, seen.step)

    train._Rank._observed = disturbed  # type: ignore[method-assign]  # a test double
    if accident in ("dying", "mute", "slow"):
        supervisor.SCHEDULER_MODULE = f"tests.jobs.{accident}_scheduler"
        train.START_PATIENCE_S = 0.1
    train.main(run_path, TRAIN)


if __name__ == "__main__":
    main(*sys.argv[1:])
