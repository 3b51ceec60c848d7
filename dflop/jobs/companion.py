"""What a process needs that runs beside the ranks: to use the cores they leave free, and to end when they do."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future

PARENT = "DFLOP_RANK0_PID"
"""Variable with the process that started this one, set by it."""
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """End on SIGTERM by way of `finally`, so that the spool is flushed, and get one when rank 0 dies.

    Raises:
        SystemExit: it has died already, while this process was importing.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):
            raise SystemExit("scheduler: rank 0 exited before the first step")


def num_free_cores() -> int:
    """Cores of this process that ranks of the same machine do not take; may be less than 1."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return num_cores - num_ranks


def in_thread(work: Callable[[], None]) -> Future[None]:
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
