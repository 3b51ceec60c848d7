from __future__ import annotations

from dflop.errors import LaunchError
from dflop.jobs import runs
from dflop.jobs.continuing import Todo
from tests.flows.loading import artifacts, flow_names, flow_run_id, load, run_flow
from tests.jobs.made import make_run


def test_planning_and_training_take_turns(server, fake, tmp_path):
    run = make_run(tmp_path, "small-1", "ready", "compare.num_batches=0")
    fake.todo = [Todo.PLAN, Todo.TRAIN, Todo.PLAN, Todo.TRAIN, Todo.TRAIN]
    before = len(flow_names())
    state = run_flow(load("campaign"), run=str(run.path))
    assert state.is_completed()
    assert fake.calls == ["plan", "train", "plan", "train", "train"]
    assert run.state()["state"] == runs.DONE
    assert flow_names()[before:] == [
        "dflop-campaign", "dflop-plan", "dflop-train", "dflop-plan", "dflop-train", "dflop-train"
    ]  # fmt: skip
    assert len(artifacts(flow_run_id(state))["dflop-plan"]) == 2, "of both plans, on the campaign's own page"


def test_a_part_that_fails_ends_the_campaign(server, fake, run):
    fake.todo = [Todo.PLAN, Todo.TRAIN, Todo.PLAN]
    fake.errors["train"] = LaunchError("rank 1 raised")
    state = run_flow(load("campaign"), run=str(run.path))
    assert state.is_failed()
    assert state.message == "rank 1 raised"
    assert fake.calls == ["plan", "train"]
    assert run.state()["state"] == runs.FAILED
