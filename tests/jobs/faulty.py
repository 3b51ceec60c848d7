"""Entry of ranks of which one meets with a fault: `python -m tests.jobs.faulty FAULT RANK RUN_DIR`.

raises     in the forward of a microbatch
killed     by SIGKILL, there
stopped    by SIGSTOP, there
stuck      there, for ever
unread     the thread that prepares steps never gets a file
told       to stop, by SIGUSR2 there, and by SIGTERM while the checkpoint is made
early      told to stop by SIGTERM before it has begun
full       its disk, when it writes the first checkpoint
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter

from dflop.jobs import train
from dflop.jobs.source import DatasetSource
from dflop.jobs.steps import TRAIN
from dflop.train.engine import Engine

STEP, MICROBATCH = 3, 1


def fail() -> None:
    raise ValueError("it went wrong")


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def hang() -> None:
    threading.Event().wait()


IN_FORWARD: dict[str, Callable[[], None]] = {
    "raises": fail,
    "killed": lambda: send(signal.SIGKILL),
    "stopped": lambda: send(signal.SIGSTOP),
    "stuck": hang,
    "told": lambda: send(signal.SIGUSR2),
}


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


def disturb(fault: str) -> None:
    if fault in IN_FORWARD:
        in_step = Nth(STEP, IN_FORWARD[fault])
        before(Engine, "_ways_out", lambda k, *_: in_step() if k == MICROBATCH else None)
    if fault == "told":
        before(train._Rank, "_before_checkpoint", lambda _: send(signal.SIGTERM))
    if fault == "unread":
        before(DatasetSource, "array", Nth(STEP, hang))
    if fault == "full":
        before(FileSystemWriter, "write_data", Nth(0, no_space))


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def main(fault: str, rank: str, run_path: str) -> None:
    if os.environ["RANK"] == rank:
        disturb(fault)
        if fault == "early":
            opened = train.open_run
            train.open_run = lambda path: (send(signal.SIGTERM), opened(path))[1]  # type: ignore[assignment]  # a test double
    train.main(run_path, TRAIN)


if __name__ == "__main__":
    main(*sys.argv[1:])
