"""Processes beside a driver or rank 0: they end with it, or are found and ended when it has gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from dflop.jobs.supervisor import PARENT
from dflop.launch.process import kill_all
from dflop.run.queue import DRIVER_VARIABLE, servers_left_behind
from tests.launch.helpers import is_gone, until

LIVES = (
    "from dflop.jobs.supervisor import die_with_parent; die_with_parent(); print('lives', flush=True); import time; "
)
PARENT_OF_ONE = (
    "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=-1); "
    "child.stdout.readline(); print(child.pid, flush=True); import time; time.sleep(60)"
)
SERVER = "prefect.server.api.server:create_app"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl and /proc are Linux's")


def run(code: str, *args: str, mark: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *args]
    env = os.environ | (mark or {})
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("parent", [None, os.getpid(), os.getpid() + 1], ids=["untold", "lives", "has gone"])
def test_one_beside_rank_0_lives_where_its_parent_does(parent):
    process = run(LIVES, mark={PARENT: str(parent)} if parent else None)
    out, said = process.communicate(timeout=60)
    if parent in (None, os.getpid()):
        assert out == "lives\n"
    else:
        assert (process.returncode, out) == (1, "")
        assert "rank 0 exited before the first step" in said


def test_it_ends_when_its_parent_is_killed():
    parent = run(PARENT_OF_ONE, LIVES + "time.sleep(60)")
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    until(lambda: is_gone(child), what="the end of the child", limit_s=20)


def test_only_servers_whose_driver_is_gone_are_left_behind():
    gone = subprocess.Popen(["true"])
    gone.wait()
    mine, dead = ({DRIVER_VARIABLE: str(pid)} for pid in (os.getpid(), gone.pid))
    marked = [(mine, SERVER), (dead, SERVER), (dead, "a job of it"), ({}, SERVER)]
    started = [run("import time; print(flush=True); time.sleep(600)", name, mark=mark) for mark, name in marked]
    try:
        for process in started:
            process.stdout.readline()
        found = [process for process in servers_left_behind() if process.pid in {p.pid for p in started}]
        assert [process.pid for process in found] == [started[1].pid]
        kill_all({*found})
        assert started[1].wait(10) == -9
        assert all(process.poll() is None for process in (started[0], *started[2:]))
        assert not psutil.pid_exists(started[1].pid)
    finally:
        for process in started:
            process.kill()
            process.communicate()
