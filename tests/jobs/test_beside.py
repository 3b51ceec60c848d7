"""A process beside rank 0 ends with it, also where rank 0 has died while the other was importing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from dflop.jobs.beside import PARENT
from tests.launch.helpers import is_gone

LIVES = "from dflop.jobs.beside import die_with_parent; die_with_parent(); print('lives', flush=True); import time; "
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")


def beside(parent: int | None, *, then: str = "") -> subprocess.Popen[str]:
    env = os.environ | ({PARENT: str(parent)} if parent else {})
    return subprocess.Popen(
        [sys.executable, "-c", LIVES + then], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("told", [False, True])
def test_it_lives_while_its_parent_does(told):
    out, _ = beside(os.getpid() if told else None).communicate(timeout=60)
    assert out == "lives\n"


def test_it_does_not_begin_for_a_parent_that_has_gone():
    process = beside(os.getpid() + 1)
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert "rank 0 has gone before there was anything to schedule" in said


def test_it_ends_when_its_parent_is_killed():
    code = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=-1); "
        "child.stdout.readline(); print(child.pid, flush=True); import time; time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, LIVES + "time.sleep(60)"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 20
    while not is_gone(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)
