"""Ending processes for certain."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from dflop.launch.process import ProcessId, family, kill_all


def test_all_are_stopped_before_the_first_is_killed(monkeypatch):
    """A rank that sees its peer go may have nothing left to wait for, and end as if all were well."""
    sent: list[int] = []
    monkeypatch.setattr(ProcessId, "send", lambda _, number: sent.append(number))
    monkeypatch.setattr(ProcessId, "is_alive", False)
    kill_all({ProcessId(1, 1), ProcessId(2, 2), ProcessId(3, 3)})
    assert sent == [signal.SIGSTOP] * 3 + [signal.SIGKILL] * 3


def test_a_family_has_children_in_sessions_of_their_own():
    command = "import subprocess, time; subprocess.Popen(['setsid', 'sleep', '60']); time.sleep(60)"
    root = subprocess.Popen([sys.executable, "-S", "-c", command], start_new_session=True)
    found = ProcessId.of(root.pid)
    deadline = time.monotonic() + 20
    while len(members := family(found)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    kill_all(set(members))
    root.wait(20)
    assert len(members) == 2
    assert not any(process.is_alive for process in members)
