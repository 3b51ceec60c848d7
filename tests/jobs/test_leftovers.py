from __future__ import annotations

import os
import subprocess
import sys

from dflop.jobs import leftovers
from dflop.launch.process import ProcessId

SERVER = "prefect.server.api.server:create_app"


def start(mark: dict[str, str], *args: str) -> subprocess.Popen[bytes]:
    """A process that looks like a temporary server, or not."""
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)", *args]
    process = subprocess.Popen(command, env={**os.environ, **mark}, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_only_servers_whose_driver_is_gone_are_left_behind():
    mine = leftovers.driver_mark()
    pid, _, ticks = mine[leftovers.VARIABLE].partition(":")
    dead = {leftovers.VARIABLE: f"{pid}:{int(ticks) + 1}"}
    started = [start(mine, SERVER), start(dead, SERVER), start(dead, "a job of it"), start({}, SERVER)]
    try:
        found = [process for process in leftovers.left_behind() if process.pid in {p.pid for p in started}]
        assert [process.pid for process in found] == [started[1].pid]
        leftovers.end(found)
        assert started[1].wait(10) == -9
        assert all(process.poll() is None for process in (started[0], *started[2:]))
        assert ProcessId.of(started[1].pid) is None
    finally:
        for process in started:
            process.kill()
            process.wait()
