from __future__ import annotations

from dflop.jobs import runs
from dflop.jobs.continuing import Todo
from tests.flows.loading import load, run_flow
from tests.jobs.made import make_run


def test_a_run_trains_and_waits_for_what_is_left(server, fake, run):
    fake.todo = [Todo.PLAN]
    assert run_flow(load("train"), run=str(run.path)).is_completed()
    assert fake.calls == ["train"]
    assert run.state()["state"] == runs.READY


def test_a_run_of_which_nothing_is_left_is_done(server, fake, tmp_path):
    run = make_run(tmp_path, "small-1", "ready", "compare.num_batches=0")
    assert run_flow(load("train"), run=str(run.path)).is_completed()
    assert run.state()["state"] == runs.DONE


def test_a_comparison_is_still_left(server, fake, run):
    assert run_flow(load("train"), run=str(run.path)).is_completed()
    assert run.state()["state"] == runs.READY
