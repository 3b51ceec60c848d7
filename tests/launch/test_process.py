"""Ending processes for certain."""

from __future__ import annotations

import subprocess
import sys
import time

from dflop.launch.process import ProcessId, family, kill_all

NUM_PAIRS = 12
PARENT = """
import pathlib, subprocess, sys
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
child.wait()
pathlib.Path(sys.argv[1]).touch()
"""


def test_nobody_lives_to_see_his_peer_die(tmp_path):
    """As a rank whose peer is killed first, and which would end by itself with a result."""
    parents = [
        subprocess.Popen([sys.executable, "-S", "-c", PARENT, tmp_path / str(i)], stdout=subprocess.PIPE, text=True)
        for i in range(NUM_PAIRS)
    ]
    children = [int(parent.stdout.readline()) for parent in parents]
    doomed = {ProcessId.of(pid) for pid in [*children, *(parent.pid for parent in parents)]}
    kill_all(doomed)
    assert [parent.wait(20) for parent in parents] == [-9] * NUM_PAIRS
    assert list(tmp_path.iterdir()) == []
    assert not any(process.is_alive for process in doomed)


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
