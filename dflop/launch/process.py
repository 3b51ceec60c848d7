"""Processes of this machine, told apart for certain and ended for certain.

A pid alone names nobody: the kernel reuses it. A pid with the start time from /proc does. A job is a session (the
controller calls setsid) plus whatever descends from it, so ending the family catches children that made process
groups or sessions of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class _Stat(NamedTuple):
    pid: int
    parent: int
    session: int
    state: str
    start_ticks: int


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that cannot be mistaken for a later one with the same pid."""

    pid: int
    start_ticks: int
    """Clock ticks between boot and the start of the process."""

    @staticmethod
    def of(pid: int) -> ProcessId | None:
        """The process that has this pid now, or None."""
        stat = _stat(pid)
        return ProcessId(pid, stat.start_ticks) if stat else None

    @property
    def is_alive(self) -> bool:
        """It is still there and is no zombie."""
        stat = _stat(self.pid)
        return stat is not None and stat.start_ticks == self.start_ticks and stat.state not in "ZX"

    def send(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):  # it went by itself in the meantime
                os.kill(self.pid, number)


class Child:
    """A process that this one forked, with what `subprocess.Popen` offers for its own."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """Minus the signal that ended it, else its exit code; None while it runs."""

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # else its pid may be somebody else's by now
            os.kill(self.pid, number)


def family(root: ProcessId) -> list[ProcessId]:
    """Live members of the session `root` leads and all their descendants, `root` included.

    Also right after `root` has died: Linux does not give its pid to anyone while a session still carries it.
    """
    leader = _stat(root.pid)
    if leader is not None and leader.start_ticks != root.start_ticks:
        return []
    stats = [s for entry in os.listdir("/proc") if entry.isdigit() and (s := _stat(int(entry)))]
    members = {s.pid for s in stats if root.pid in (s.session, s.pid)}
    while children := {s.pid for s in stats if s.parent in members} - members:
        members |= children
    return [ProcessId(s.pid, s.start_ticks) for s in stats if s.pid in members and s.state not in "ZX"]


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that it stays in the family.

    Raises:
        OSError: the kernel does not let us.
    """
    pr_set_child_subreaper = 36
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_family(root: ProcessId, *, grace_s: float) -> None:
    """Ask `root` to stop with SIGTERM, give it `grace_s` to clean up, then kill what is left of its family."""
    doomed = family(root)
    if root.is_alive:
        root.send(signal.SIGTERM)
        wait_until(lambda: not any(p.is_alive for p in doomed), grace_s)
    kill_all({*doomed, *family(root)})


def kill_all(processes: set[ProcessId]) -> None:
    """SIGKILL every one that is still alive, and wait until the kernel has taken them down.

    All are stopped before the first dies: a rank that sees its peer go might otherwise end by itself, with a result.
    """
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            process.send(number)
    wait_until(lambda: not any(p.is_alive for p in processes), 5.0)


def wait_until(is_so: Callable[[], bool], limit_s: float) -> None:
    """Return once it is so, or the time is over."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and not is_so():
        time.sleep(0.02)


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name, in parentheses, may itself hold spaces and parentheses: count from the last one.
    fields = text[text.rindex(")") + 2 :].split()
    return _Stat(pid, parent=int(fields[1]), session=int(fields[3]), state=fields[0], start_ticks=int(fields[19]))
