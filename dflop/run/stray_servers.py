"""Temporary Prefect servers that a driver left behind: killed with -9, it ends nothing of its own.

They are told from everybody else's by a variable in their environment that names the driver, and are ended only when
that process is gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from dflop.launch.process import ProcessId, kill_all

VARIABLE = "DFLOP_DRIVER"
_SERVER = b"prefect.server.api.server:create_app"


def driver_mark() -> dict[str, str]:
    """Variable that names this process to whatever it starts."""
    me = ProcessId.of(os.getpid())
    assert me is not None
    return {VARIABLE: f"{me.pid}:{me.start_ticks}"}


def left_behind() -> list[ProcessId]:
    """Temporary servers of this user whose driver is gone."""
    return [process for process, driver in _servers() if not driver.is_alive]


def end(processes: list[ProcessId]) -> None:
    """End them; what they kept is in their database."""
    kill_all(set(processes))


def _servers() -> Iterator[tuple[ProcessId, ProcessId]]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if _SERVER not in (entry / "cmdline").read_bytes():
                continue
            variables = dict(v.split(b"=", 1) for v in (entry / "environ").read_bytes().split(b"\0") if b"=" in v)
        except OSError:
            continue  # somebody else's, or gone
        pid, _, ticks = variables.get(VARIABLE.encode(), b"").partition(b":")
        process = ProcessId.of(int(entry.name))
        if process is not None and pid.isdigit() and ticks.isdigit():
            yield process, ProcessId(int(pid), int(ticks))
