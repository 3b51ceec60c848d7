"""How any flow comes by its run and how it ends; the plan flow stands for all of them."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId

from dflop.errors import ConfigError, InfrastructureError, LaunchError
from dflop.jobs import runs
from dflop.jobs.continuing import Todo
from dflop.jobs.driver import driver_of
from dflop.launch import JobState
from tests.flows.loading import artifacts, flow_run_id, load, module, read_flow_run, run_flow
from tests.jobs.configs import make_config, make_dataset, write_config
from tests.jobs.made import add_job, make_run
from tests.launch.helpers import until

driving = module("driving")


def error_of(state: Any) -> Exception:
    assert state.is_failed(), state
    return asyncio.run(state.aresult(raise_on_failure=False))


def test_a_flow_run_is_named_tagged_and_labelled_after_its_run(server, fake, run):
    state = run_flow(load("plan"), run=str(run.path))
    assert asyncio.run(state.aresult()) == str(run.path)
    found = read_flow_run(state)
    assert found.name == run.run_id
    assert {"dflop", "small", "cluster:here"} <= set(found.tags)
    assert found.labels[driving.RUN_DIR_LABEL] == str(run.path)
    assert fake.calls == ["plan"]
    assert run.state()["state"] == runs.READY


def test_a_configuration_may_be_typed_or_a_file(server, fake, tmp_path):
    make_dataset(tmp_path)
    path = write_config(tmp_path)
    typed = run_flow(load("plan"), config=make_config(tmp_path).model_dump(mode="json"))
    of_file = run_flow(load("plan"), config_path=str(path))
    assert asyncio.run(typed.aresult()) == asyncio.run(of_file.aresult()), "the same configuration, the same run"
    other = run_flow(load("plan"), config_path=str(path), overrides=["train.num_steps=7"])
    run = runs.RunDir(tmp_path / "runs" / read_flow_run(other).name)
    assert run.config().train.num_steps == 7
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_a_default_path_does_not_keep_anybody_from_the_form(server, fake, tmp_path, log):
    make_dataset(tmp_path)
    config = make_config(tmp_path, "train.num_steps=9").model_dump(mode="json")
    state = run_flow(load("plan"), config=config, config_path="configs/demo.yaml")
    assert runs.RunDir(tmp_path / "runs" / read_flow_run(state).name).config().train.num_steps == 9
    assert "configs/demo.yaml) is not read" in log.text


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({}, "which run\\? the flow was given no configuration"),
        ({"run": "nowhere"}, "no run `nowhere`"),
        ({"config_path": "nowhere.yaml"}, "cannot read the configuration"),
        ({"config": "demo", "overrides": ["a.b=1"]}, "`overrides` are for a file"),
    ],
)
def test_what_cannot_be_meant_is_said(server, fake, tmp_path, monkeypatch, given, what):
    monkeypatch.chdir(tmp_path)
    if given.get("config") == "demo":
        given = {**given, "config": make_config(tmp_path).model_dump(mode="json")}
    error = error_of(run_flow(load("plan"), **given))
    assert isinstance(error, ConfigError)
    with pytest.raises(ConfigError, match=what):
        raise error
    assert fake.calls == []
    assert not (tmp_path / "runs").exists()


def test_an_error_of_ours_ends_a_flow_as_a_state_without_a_traceback(server, fake, run, log):
    fake.errors["plan"] = LaunchError("nothing fits", where="here", hint="a larger cluster")
    state = run_flow(load("plan"), run=str(run.path))
    assert str(error_of(state)) == "nothing fits\n  where: here\n  hint:  a larger cluster"
    assert state.message == "nothing fits"
    assert "Traceback" not in log.text
    assert not any(record.exc_info for record in log.records)
    assert "hint:  a larger cluster" in log.text
    assert run.state()["state"] == runs.FAILED


def test_a_part_retries_by_itself_and_prefect_does_not_repeat_it(server, fake, run):
    fake.errors["plan"] = InfrastructureError("node1 went away")
    error_of(run_flow(load("plan"), run=str(run.path)))
    assert fake.calls == ["plan"]


def test_a_fault_of_ours_is_raised(server, fake, run):
    fake.errors["plan"] = ZeroDivisionError("a fault of ours")
    assert isinstance(error_of(run_flow(load("plan"), run=str(run.path))), ZeroDivisionError)
    assert run.state()["state"] == runs.FAILED
    assert driver_of(run) is None


def test_a_finished_run_is_left_as_it_is(server, fake, tmp_path, log):
    run = make_run(tmp_path, state=runs.DONE)
    before = run.state()
    state = run_flow(load("plan"), run=str(run.path))
    assert state.is_completed()
    assert "is finished, nothing is left to do" in log.text
    assert (fake.calls, run.state()) == ([], before)


def test_a_run_that_is_driven_is_refused(server, fake, run):
    from dflop.jobs.driver import drive_alone

    with drive_alone(run, print):
        error = error_of(run_flow(load("plan"), run=str(run.path)))
    assert isinstance(error, LaunchError)
    assert f"driven by process {os.getpid()}" in error.what
    assert fake.calls == []


def test_jobs_are_a_table_after_every_part(server, fake, run):
    add_job(run, "data-0", JobState.RUNNING, JobState.DONE)
    add_job(run, "train", JobState.RUNNING, JobState.FAILED)
    shown = artifacts(flow_run_id(run_flow(load("plan"), run=str(run.path))))
    (table,) = shown["dflop-jobs"]
    assert str(run.path) in table.description
    assert '"job": "train", "id": "id-train", "state": "failed", "why": "for a reason"' in table.data


def test_lines_of_tasks_are_in_the_log_of_the_flow_that_was_started(server, fake, run):
    fake.todo = [Todo.PLAN]
    state = run_flow(load("campaign"), run=str(run.path))

    async def read() -> list[Any]:
        async with get_client() as client:
            wanted = LogFilterFlowRunId(any_=[flow_run_id(state)])
            return await client.read_logs(LogFilter(flow_run_id=wanted))

    def found() -> Any:
        return next((log for log in asyncio.run(read()) if log.message == "plan says a line"), None)

    line = until(found, what="the line on the server")
    assert line.task_run_id is not None, "and in that of the task"


def test_what_cannot_be_shown_was_done_all_the_same(server, fake, run, monkeypatch, log):
    def broken(_run):
        raise ConfigError("no tables")

    monkeypatch.setattr("dflop.jobs.showing.cost_rows", broken)
    state = run_flow(load("plan"), run=str(run.path))
    assert state.is_completed()
    assert "cannot be shown: no tables" in log.text


def test_a_cancelled_flow_run_empties_its_queue(server, fake, run, monkeypatch):
    cancelled: list[str] = []
    monkeypatch.setattr(driving, "cancel_run", lambda found, say: cancelled.append(found.run_id))
    state = run_flow(load("plan"), run=str(run.path))
    as_it_is = read_flow_run(state)
    driving.empty_the_queue(flow=None, flow_run=as_it_is, state=None)
    as_it_began = SimpleNamespace(id=as_it_is.id, labels={})
    driving.empty_the_queue(flow=None, flow_run=as_it_began, state=None)
    assert cancelled == [run.run_id] * 2
    for name in ("profile", "plan", "train", "campaign", "pipeline"):
        assert load(name).on_cancellation_hooks == [driving.empty_the_queue], name


def test_before_its_run_is_known_a_flow_run_is_named_by_what_it_was_given(server, fake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = {
        "?": {},
        "nowhere": {"config_path": "configs/nowhere.yaml"},
        "demo-1": {"run": "runs/demo-1"},
    }
    for name, given in named.items():
        assert read_flow_run(run_flow(load("plan"), **given)).name == name
