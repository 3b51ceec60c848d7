"""The scheduler process that dies: when it is started again, and what is told about it."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from dflop.jobs import supervisor
from dflop.jobs.supervisor import Supervisor

NUM_STEPS = 100


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Starts a supervisor of the module that is given by its source; ends its process in the end."""
    made = []
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(source, **options):
        (tmp_path / "pretender.py").write_text(source)
        monkeypatch.setattr(supervisor, "SCHEDULER_MODULE", "pretender")
        options = {"num_steps": NUM_STEPS, "max_restarts": 2} | options
        made.append(Supervisor(["a", "b"], tmp_path / "log", **options))
        return made[-1]

    yield run
    for one in made:
        one.stop(at_once=True)


def until_dead(watched):
    with contextlib.suppress(ChildProcessError):  # it was asked after before
        os.waitid(os.P_PID, watched.pid, os.WEXITED | os.WNOWAIT)
    assert not watched.is_alive()


def tend(watched, step):
    events = []
    watched.tend(step, lambda step, kind, detail: events.append((step, kind, detail)))
    return [(at, kind) for at, kind, _ in events]


DIES = "import sys; print(sys.argv[1:]); sys.exit(3)"
LIVES = "import signal; signal.pause()"


def test_a_killed_one_is_started_again_a_step_later_and_one_that_lives_left_alone(make):
    watched = make(LIVES)
    assert [tend(watched, step) for step in range(3)] == [[], [], []]
    os.kill(watched.pid, signal.SIGKILL)
    until_dead(watched)
    assert tend(watched, 5) == [(5, "scheduler_dead")]
    assert tend(watched, 6) == [(6, "scheduler_restarted")]
    assert watched.is_alive()
    assert tend(watched, 7) == []


def test_one_that_always_dies_is_given_up_after_ever_longer_pauses(make, tmp_path):
    watched, found = make(DIES), []
    for step in range(40):
        until_dead(watched)
        found += tend(watched, step)
    assert found == [
        (0, "scheduler_dead"), (1, "scheduler_restarted"),
        (2, "scheduler_dead"), (6, "scheduler_restarted"),
        (7, "scheduler_dead"), (7, "scheduler_given_up"),
    ]  # fmt: skip
    starts = (tmp_path / "log").read_text().splitlines()
    assert starts == ["['a', 'b', '1']", "['a', 'b', '2']", "['a', 'b', '3']"], "producers of one name would collide"


def test_one_that_cannot_be_started_again_does_not_end_the_job(make, monkeypatch):
    watched = make(DIES)
    until_dead(watched)
    assert tend(watched, 0) == [(0, "scheduler_dead")]
    monkeypatch.setattr(supervisor.sys, "executable", "/no/such/python")
    assert tend(watched, 1) == [(1, "scheduler_given_up")]
    assert tend(watched, 2) == []


def test_without_restarts_it_is_given_up_at_once_unless_its_plans_are_out_already(make):
    watched, said = make(DIES, max_restarts=0), []
    until_dead(watched)
    watched.tend(0, lambda *event: said.append(event))
    assert [event[:2] for event in said] == [(0, "scheduler_dead"), (0, "scheduler_given_up")]
    assert "exit code 3" in said[0][2]
    assert "log" in said[0][2]
    watched = make(DIES, num_steps=10)
    until_dead(watched)
    assert [tend(watched, step) for step in (8, 9)] == [[], []]
