"""Flows on a Prefect server; parts of a run are played. Everything that needs the server is here: it costs 20 s."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dflop.errors import ConfigError, DataError, InfrastructureError, LaunchError, StoreError
from dflop.launch import JobState
from dflop.run import lifecycle
from dflop.run.driver_lock import driver_of
from dflop.steps import parts
from dflop.steps.continuing import Todo
from tests.flows.loading import artifacts, ask, flow_names, flow_run_id, load, module, read_flow_run, run_flow
from tests.jobs.made import add_job, make_run
from tests.launch.helpers import until

pytestmark = pytest.mark.usefixtures("server")
ALONE = "compare.num_batches=0"


def error_of(state: Any) -> Exception:
    assert state.is_failed(), state
    return asyncio.run(state.aresult(raise_on_failure=False))


@pytest.fixture
def summarised(monkeypatch):
    load("pipeline")
    monkeypatch.setattr("reports.markdown_summary", lambda found: f"# {found.verdict}")
    monkeypatch.setattr("driving.markdown_history", lambda found: "nothing happened")


@pytest.mark.budget(60, "the first test of a worker starts the Prefect server")
def test_a_flow_run_is_named_after_its_run_shows_its_jobs_and_leads_to_them(fake, run, monkeypatch):
    add_job(run, "data-0", JobState.RUNNING, JobState.DONE)
    add_job(run, "train", JobState.RUNNING, JobState.FAILED)
    state = run_flow(load("plan"), run=str(run.path))
    assert asyncio.run(state.aresult()) == str(run.path)
    found, driving = read_flow_run(state), module("driving")
    assert found.name == run.run_id
    assert {"dflop", "small", "cluster:here"} <= set(found.tags)
    assert found.labels[driving.RUN_DIR_LABEL] == str(run.path)
    assert fake.calls == ["plan"]
    assert run.state()["state"] == lifecycle.READY
    shown = artifacts(flow_run_id(state))
    (plan,), (jobs,) = shown["dflop-plan"], shown["dflop-jobs"]
    assert (plan.type, plan.description) == ("markdown", "it is the best")
    assert "![a step](data:image/png;base64,AAAA)" in plan.data
    assert shown["dflop-model-profile"][0].data == '[{"module": "llm", "noise": null}]'
    assert not any(a.type == "image" for versions in shown.values() for a in versions), "its page prints its address"
    assert str(run.path) in jobs.description
    assert '"job": "train", "id": "id-train", "state": "failed", "why": "for a reason"' in jobs.data
    cancelled: list[str] = []
    monkeypatch.setattr(driving, "cancel_run", lambda found, say: cancelled.append(found.run_id))
    for flow_run in (found, SimpleNamespace(id=found.id, labels={})):  # as it is, and as it began
        driving.empty_the_queue(flow=None, flow_run=flow_run, state=None)
    assert cancelled == [run.run_id] * 2


def test_modules_are_not_profiled_for_a_dataset_that_cannot_be_read(fake, run):
    fake.errors["data_profile"] = DataError("too much of it is unusable")
    assert run_flow(load("profile"), run=str(run.path)).is_failed()
    assert fake.calls == ["data_profile"]


def test_the_parts_come_in_order_and_everything_is_on_one_page(fake, tmp_path, summarised):
    run = make_run(tmp_path, "small-1", "ready", "dataset.demo=true")
    fake.todo = [Todo.PLAN, Todo.TRAIN]
    before = len(flow_names())
    state = run_flow(load("pipeline"), run=str(run.path))
    assert state.is_completed(), state
    assert fake.calls == ["demo_data", "data_profile", "model_profile", "plan", "train", "compare", "report"]
    assert run.state()["state"] == lifecycle.DONE
    names = ["dflop-pipeline", "dflop-profile", "dflop-plan", "dflop-train", "dflop-report"]
    assert flow_names()[before:] == names
    shown = artifacts(flow_run_id(state))
    assert {"dflop-data-profile", "dflop-model-profile", "dflop-plan", "dflop-summary", "dflop-report"} <= set(shown)
    assert shown["dflop-data-profile"][0].data == '[{"group": "all", "p50_tokens": 12}]'


def test_a_report_that_cannot_be_written_undoes_no_training_and_unwanted_comparisons_are_not_trained(fake, tmp_path):
    run = make_run(tmp_path, "small-1", "ready", ALONE)
    fake.errors["report"] = StoreError("no space")
    assert run_flow(load("pipeline"), run=str(run.path)).is_failed()
    assert fake.calls == ["data_profile", "model_profile", "report"]
    assert run.state()["state"] == lifecycle.DONE


def test_planning_and_training_take_turns_and_their_lines_are_in_the_log_of_the_campaign(fake, tmp_path):
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId

    run = make_run(tmp_path, "small-1", "ready", ALONE)
    fake.todo = [Todo.PLAN, Todo.TRAIN, Todo.TRAIN, Todo.PLAN]
    before = len(flow_names())
    state = run_flow(load("campaign"), run=str(run.path))
    assert state.is_completed()
    assert fake.calls == ["plan", "train", "train", "plan"]
    assert run.state()["state"] == lifecycle.DONE
    assert flow_names()[before:] == ["dflop-campaign", "dflop-plan", "dflop-train", "dflop-train", "dflop-plan"]
    assert len(artifacts(flow_run_id(state))["dflop-plan"]) == 2, "of both plans, on the campaign's own page"
    wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run_id(state)]))

    def found() -> Any:
        lines = ask(lambda client: client.read_logs(wanted))
        return next((line for line in lines if line.message == "plan says a line"), None)

    line = until(found, what="the line in the log of the flow that was started")
    assert line.task_run_id is not None, "and in that of the task"


def test_a_part_that_fails_ends_the_campaign(fake, run):
    fake.todo = [Todo.TRAIN, Todo.PLAN]
    fake.errors["train"] = LaunchError("rank 1 raised")
    state = run_flow(load("campaign"), run=str(run.path))
    assert state.is_failed()
    assert state.message == "rank 1 raised"
    assert fake.calls == ["train"]
    assert run.state()["state"] == lifecycle.FAILED


@pytest.mark.parametrize(("todo", "overrides"), [([Todo.PLAN], [ALONE]), ([], [])])
def test_a_run_trains_and_waits_for_a_plan_or_a_comparison_that_is_left(fake, tmp_path, todo, overrides):
    run = make_run(tmp_path, "small-1", "ready", *overrides)
    fake.todo = todo
    assert run_flow(load("train"), run=str(run.path)).is_completed()
    assert fake.calls == ["train"]
    assert run.state()["state"] == lifecycle.READY


@pytest.mark.parametrize("told", ["Cancelling", "Cancelled"])
def test_a_flow_run_that_nobody_listens_for_hears_its_cancellation(fake, run, monkeypatch, log, told):
    """As that of `dflop run`, or of a worker whose listener gave up in an outage."""
    from prefect import states
    from prefect.client.orchestration import get_client
    from prefect.context import FlowRunContext

    monkeypatch.setattr(module("hearing"), "EVERY_S", 0.5)

    async def train(drive: Any) -> None:
        context = FlowRunContext.get()
        assert context is not None
        assert context.flow_run is not None
        async with get_client() as client:
            await client.set_flow_run_state(context.flow_run.id, getattr(states, told)(), force=True)
        while not drive.run.is_cancelled():
            await asyncio.sleep(0.05)
        raise LaunchError("job `train` (local 7) cancelled")

    monkeypatch.setattr(parts, "train", train)
    state = run_flow(load("train"), run=str(run.path))
    assert state.is_cancelled()
    assert read_flow_run(state).state.is_cancelled()
    assert "the flow run is cancelled" in log.text
    assert run.state()["state"] == lifecycle.CANCELLED


def test_what_cannot_be_meant_fails_a_flow_that_has_no_run(fake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = run_flow(load("plan"), config_path="configs/nowhere.yaml")
    assert isinstance(error_of(state), ConfigError)
    assert read_flow_run(state).name == "nowhere"
    assert fake.calls == []
    assert not (tmp_path / "runs").exists()


def test_an_error_of_ours_ends_a_flow_as_a_state_without_a_traceback_and_is_not_tried_again(fake, run, log):
    fake.errors["plan"] = InfrastructureError("node1 went away", where="here", hint="a larger cluster")
    state = run_flow(load("plan"), run=str(run.path))
    assert str(error_of(state)) == "node1 went away\n  where: here\n  hint:  a larger cluster"
    assert state.message == "node1 went away"
    assert fake.calls == ["plan"], "the part retries by itself, Prefect does not"
    assert "Traceback" not in log.text
    assert not any(record.exc_info for record in log.records)
    assert "hint:  a larger cluster" in log.text
    assert run.state()["state"] == lifecycle.FAILED


def test_a_fault_of_ours_is_raised(fake, run):
    fake.errors["plan"] = ZeroDivisionError("a fault of ours")
    assert isinstance(error_of(run_flow(load("plan"), run=str(run.path))), ZeroDivisionError)
    assert run.state()["state"] == lifecycle.FAILED
    assert driver_of(run) is None


def test_a_finished_run_is_left_as_it_is(fake, tmp_path, log):
    run = make_run(tmp_path, state=lifecycle.DONE)
    before = run.state()
    state = run_flow(load("plan"), run=str(run.path))
    assert state.is_completed()
    assert "is finished, nothing is left to do" in log.text
    assert (fake.calls, run.state()) == ([], before)


def test_what_cannot_be_shown_was_done_all_the_same(fake, run, monkeypatch, log):
    def broken(_run: Any) -> None:
        raise ConfigError("no tables")

    monkeypatch.setattr("dflop.steps.plan_page.cost_rows", broken)
    state = run_flow(load("plan"), run=str(run.path))
    assert state.is_completed()
    assert "cannot be shown: no tables" in log.text
