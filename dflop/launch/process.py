"""Processes of this machine, found by a variable in their environment, which children inherit, and ended for certain.

A pid alone names nobody: the kernel reuses it. A `psutil.Process` knows the start time, too, and signals no other.
Children are found in whatever process group or session they are, and after their parents have ended.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable

import psutil

JOB_VARIABLE = "SUBMITIT_LOCAL_JOB_ID"
"""In the environment of whatever runs in a local job, the job's id; read by submitit, too."""
_EXEC_S = 1.0
"""How long a program may take to begin."""


def processes_where(is_wanted: Callable[[psutil.Process], bool]) -> set[psutil.Process]:
    """Live processes of this user for which it is so, and all their descendants."""
    found = set[psutil.Process]()
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error):  # somebody else's, gone, or a zombie
            process = psutil.Process(pid)
            if process not in found and is_wanted(process):
                found |= {process, *process.children(recursive=True)}
    return {process for process in found if is_alive(process)}


def processes_of_job(job_id: str) -> set[psutil.Process]:
    """A local job's controller, tasks, and all that they started."""
    return processes_where(lambda process: process.environ().get(JOB_VARIABLE) == job_id)


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Environment of a live process; Linux shows none while its program is being loaded, which is waited for.

    Raises:
        psutil.Error: it is somebody else's, gone, or a zombie.
    """
    wait_until(lambda: bool(process.environ()) or not is_alive(process), _EXEC_S)
    found: dict[str, str] = process.environ()
    return found


def is_alive(process: psutil.Process) -> bool:
    """It is still there and is no zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def tell(processes: Iterable[psutil.Process], number: int) -> None:
    """Send a signal to those that have not ended meanwhile."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL every one that is still alive, and wait until the kernel has taken them down.

    All are stopped before the first dies: a rank that sees its peer go might otherwise end by itself, with a result.
    """
    for number in (signal.SIGSTOP, signal.SIGKILL):
        tell(processes, number)
    wait_for_end(processes, 5.0)


def wait_for_end(processes: Iterable[psutil.Process], limit_s: float) -> None:
    """Return once all have ended, or the time is over."""
    wait_until(lambda: not any(map(is_alive, processes)), limit_s)


def wait_until(is_so: Callable[[], bool], limit_s: float) -> None:
    """Return once it is so, or the time is over."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and not is_so():
        time.sleep(0.02)
