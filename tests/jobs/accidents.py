"""Entry of ranks of which one meets with an accident: `python -m tests.jobs.accidents ACCIDENT RANK RUN_DIR`.

raises     in the forward of a microbatch
killed     by SIGKILL, there
stopped    by SIGSTOP, there
stuck      there, for ever
unread     the thread that prepares steps never gets a file
early      told to stop by SIGTERM before it has begun
full       its disk, when it writes the first checkpoint

These happen to the scheduler of rank 0, which waits for it between two steps: else training would be over too soon.

scheduler-killed   by SIGKILL twice, the second time just after its restart; what its third start plans is waited for
scheduler-mute     it lives and publishes nothing
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter

from dflop.jobs import rank, supervisor, train
from dflop.jobs.rank import Rank
from dflop.jobs.sample_source import DatasetSource
from dflop.records import StepObservation
from dflop.run.batches import TRAIN
from dflop.train.engine import Engine
from dflop.train.wire import open_store, plan_key

STEP, MICROBATCH = 3, 1
LIMIT_S = 120


def before(cls: type[Any], name: str, act: Callable[..., None]) -> None:
    """Act, with the arguments of the method, before each of its calls."""
    method = getattr(cls, name)

    def disturbed(self: Any, *args: Any, **kwargs: Any) -> Any:
        act(*args)
        return method(self, *args, **kwargs)

    setattr(cls, name, disturbed)


class Nth:
    """Acts the nth time it is asked to, from 0."""

    def __init__(self, n: int, act: Callable[[], None]) -> None:
        self._left, self._act = n, act

    def __call__(self, *args: Any) -> None:
        self._left -= 1
        if self._left == -1:
            self._act()


def in_forward(act: Callable[[], None]) -> None:
    """Act in the forward of a microbatch of a step."""
    in_step = Nth(STEP, act)
    before(Engine, "_ways_out", lambda k, *_: in_step() if k == MICROBATCH else None)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def hang() -> None:
    threading.Event().wait()


def fail() -> None:
    raise ValueError("it went wrong")


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def early() -> None:
    opened = train.open_run
    train.open_run = lambda path: (send(signal.SIGTERM), opened(path))[1]  # type: ignore[assignment]  # a test double


def scheduler_mute() -> None:
    supervisor.SCHEDULER_MODULE = "tests.jobs.mute_scheduler"
    rank.START_PATIENCE_S = 0.1


def scheduler_killed() -> None:
    observed = Rank._observed

    def disturbed(rank: Any, seen: StepObservation) -> None:
        if seen.step == 3:
            kill_scheduler(rank)
        observed(rank, seen)  # looks after its scheduler
        if seen.step == 4:
            kill_scheduler(rank)
        if seen.step == 9:
            own = open_store(rank.store.host, rank.store.port, is_server=False, timeout_s=LIMIT_S)
            own.wait([plan_key(13)], timedelta(seconds=LIMIT_S))

    Rank._observed = disturbed  # type: ignore[method-assign]  # a test double


def kill_scheduler(rank: Any) -> None:
    os.kill(rank.supervisor.pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # waited for before
        os.waitid(os.P_PID, rank.supervisor.pid, os.WEXITED | os.WNOWAIT)


ACCIDENTS: dict[str, Callable[[], None]] = {
    "raises": lambda: in_forward(fail),
    "killed": lambda: in_forward(lambda: send(signal.SIGKILL)),
    "stopped": lambda: in_forward(lambda: send(signal.SIGSTOP)),
    "stuck": lambda: in_forward(hang),
    "unread": lambda: before(DatasetSource, "array", Nth(STEP, hang)),
    "early": early,
    "full": lambda: before(FileSystemWriter, "write_data", Nth(0, no_space)),
    "scheduler-killed": scheduler_killed,
    "scheduler-mute": scheduler_mute,
}


def main(accident: str, rank: str, run_path: str) -> None:
    if os.environ["RANK"] == rank:
        ACCIDENTS[accident]()
    train.main(run_path, TRAIN)


if __name__ == "__main__":
    main(*sys.argv[1:])
