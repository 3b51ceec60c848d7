"""Flows on a Prefect server; steps of a run are played. Everything that needs the server is here: it costs 20 s."""

import asyncio
import uuid
from typing import Any

import pytest

from dflop.cli.server import close_left, create_automations
from dflop.errors import ConfigError, InfrastructureError, LaunchError, StoreError
from dflop.launch import JobState
from dflop.run import lifecycle
from dflop.run.driver_lock import driver_of
from dflop.steps import training
from dflop.steps.training import Trained
from tests.flows.loading import artifacts, ask, flow_run_id, load, module, read_flow_run, run_flow, task_runs
from tests.jobs.made import add_job, make_run

pytestmark = pytest.mark.usefixtures("server")
TURNS = [Trained(0, is_over=False), Trained(20, is_over=False), Trained(40, is_over=True)]


def error_of(state: Any) -> Exception:
    assert state.is_failed(), state
    return asyncio.run(state.aresult(raise_on_failure=False))


@pytest.mark.budget(90, "the first test of a worker starts the Prefect server")
def test_values_flow_from_task_to_task_and_a_second_run_finds_its_profiles(fake, tmp_path):
    first = make_run(tmp_path, "small-1", "ready")
    fake.trained = [*TURNS]
    state = run_flow(load("pipeline"), run=str(first.path))
    assert state.is_completed(), state
    calls = ["profile data", "profile model", "plan", "train", "plan", "train", "compare", "report"]
    assert fake.calls == calls
    assert first.state()["state"] == lifecycle.DONE
    found = task_runs(state)
    names = ["profile-data", "profile-model", *("optimize-plan", "train") * 2, "compare", "report"]
    assert [task.name.rsplit("-", 1)[0] for task in found] == names
    data, model, plan, train, plan_2, train_2, compare, report = found
    edges = [(model, data), (plan, model), (train, plan), (plan_2, model), (plan_2, train), (train_2, plan_2)]
    for task, before in [*edges, (compare, train_2), (report, train_2)]:
        assert before.id in inputs_of(task), (task.name, before.name)

    second = make_run(tmp_path, "small-2", "ready", "compare.num_batches=0")
    fake.calls.clear()
    state = run_flow(load("pipeline"), run=str(second.path))
    assert [task.state.name for task in task_runs(state)] == [*["Cached"] * 2, "Completed"]
    assert fake.calls == ["report"]

    fake.stored.clear()
    third = make_run(tmp_path, "small-3", "ready", "compare.num_batches=0")
    state = run_flow(load("profile"), run=str(third.path))
    assert [task.state.name for task in task_runs(state)] == ["Completed"] * 2
    assert fake.calls == ["report", *calls[:2]], "the store has lost them"


def inputs_of(task: Any) -> set[Any]:
    return {result.id for results in task.task_inputs.values() for result in results if hasattr(result, "id")}


def test_a_flow_run_is_named_after_its_run_shows_its_jobs_and_leads_to_them(fake, run):
    add_job(run, "train", JobState.RUNNING, JobState.FAILED)
    fake.trained = [Trained(0, is_over=False), Trained(40, is_over=True)]
    state = run_flow(load("pipeline"), run=str(run.path))
    found = read_flow_run(state)
    assert found.name == run.run_id
    assert {"dflop", "small", "cluster:here"} <= set(found.tags)
    assert found.labels[module("flow_run").RUN_DIR_LABEL] == str(run.path)
    shown = artifacts(flow_run_id(state))
    (plan,), jobs = shown["dflop-plan"], shown["dflop-jobs"][-1]
    assert (plan.type, plan.description) == ("markdown", "for 2")
    assert "![a step](data:image/png;base64,AAAA)" in plan.data
    assert shown["dflop-data-profile"][0].data == '[{"group": "all", "p50_tokens": 12}]'
    assert shown["dflop-model-profile"][0].data == '[{"module": "llm", "noise": null}]'
    assert not any(a.type == "image" for versions in shown.values() for a in versions), "its page prints its address"
    assert str(run.path) in jobs.description
    assert '"job": "train", "id": "id-train", "state": "failed", "reason": "for a reason"' in jobs.data
    (bar,) = shown["dflop-train-progress"]
    assert (bar.type, bar.data, bar.description) == ("progress", 100.0, "done, step 40 of 40")
    assert shown["dflop-summary"][0].data == "# nothing was trained"
    assert shown["dflop-history"][-1].data == "nothing happened"


def test_what_the_cluster_did_is_done_again_and_what_a_job_did_is_not(fake, run, log):
    fake.trained = [Trained(0, is_over=False), Trained(40, is_over=True)]
    fake.errors["train"] = [InfrastructureError("node1 went away\n  | its log"), InfrastructureError("lost")]
    state = run_flow(load("pipeline"), run=str(run.path))
    assert state.is_completed(), state
    assert {task.name.rsplit("-", 1)[0]: task.run_count for task in task_runs(state)}["train"] == 3
    assert fake.calls.count("train") == 3
    assert "Task run failed with exception: node1 went away - Retry 1/2" in log.text
    run.write_state({**run.state(), "state": lifecycle.READY})
    fake.errors["train"], fake.calls = [LaunchError("rank 1 raised", where="here", hint="a larger cluster")], []
    state = run_flow(load("train"), run=str(run.path))
    assert str(error_of(state)) == "rank 1 raised\n  where: here\n  hint:  a larger cluster"
    assert fake.calls == ["train"]
    assert run.state()["state"] == lifecycle.FAILED
    assert "Traceback" not in log.text
    assert not any(record.exc_info for record in log.records)
    assert "hint:  a larger cluster" in log.text


def test_a_report_that_cannot_be_written_undoes_no_training(fake, run):
    fake.errors["report"] = [StoreError("no space")]
    assert isinstance(error_of(run_flow(load("pipeline"), run=str(run.path))), StoreError)
    assert run.state()["state"] == lifecycle.DONE


@pytest.mark.parametrize("step", ["plan", "train"])
def test_a_single_step_leaves_the_run_ready_for_the_next(fake, run, step):
    fake.trained = [Trained(20, is_over=False)]
    assert run_flow(load(step), run=str(run.path)).is_completed()
    assert (fake.calls, run.state()["state"]) == ([step], lifecycle.READY)


def test_a_report_can_be_had_of_a_run_that_somebody_drives(fake, run, monkeypatch):
    monkeypatch.setenv("DFLOP_RUNS", str(run.path.parent))
    before = run.state()
    state = run_flow(load("report"))
    assert state.is_completed(), state
    assert (fake.calls, run.state()) == (["report"], before)


@pytest.mark.parametrize("told", ["Cancelling", "Cancelled"])
def test_a_flow_run_that_nobody_listens_for_hears_its_cancellation(fake, run, monkeypatch, log, told):
    """As that of `dflop run`."""
    from prefect import states
    from prefect.client.orchestration import get_client
    from prefect.context import TaskRunContext

    monkeypatch.setattr(module("flow_run"), "WATCH_EVERY_S", 0.5)

    async def train(run: Any, *_: Any) -> None:
        async with get_client() as client:
            flow_run = TaskRunContext.get().task_run.flow_run_id
            await client.set_flow_run_state(flow_run, getattr(states, told)(), force=True)
        while not run.is_cancelled():
            await asyncio.sleep(0.05)
        raise LaunchError("job `train` (local 7) cancelled")

    monkeypatch.setattr(training, "train", train)
    state = run_flow(load("train"), run=str(run.path))
    assert state.is_cancelled()
    assert read_flow_run(state).state.is_cancelled()
    assert "the flow run is cancelled" in log.text
    assert run.state()["state"] == lifecycle.CANCELLED


def test_a_living_flow_that_was_marked_as_crashed_is_set_right(fake, run, monkeypatch):
    """As by an automation, after an outage that was longer than it waits for a heartbeat."""
    from prefect import states
    from prefect.client.orchestration import get_client
    from prefect.context import TaskRunContext

    monkeypatch.setattr(module("flow_run"), "WATCH_EVERY_S", 0.2)

    async def train(*_: Any) -> Trained:
        async with get_client() as client:
            flow_run = TaskRunContext.get().task_run.flow_run_id
            await client.set_flow_run_state(flow_run, states.Crashed(), force=True)
            while not (await client.read_flow_run(flow_run)).state.is_running():
                await asyncio.sleep(0.1)
        return Trained(40, is_over=True)

    monkeypatch.setattr(training, "train", train)
    assert read_flow_run(run_flow(load("train"), run=str(run.path))).state.is_completed()


def test_a_flow_run_that_a_killed_driver_left_running_is_closed_by_the_next(fake, run):
    from prefect import states

    def left(client: Any) -> Any:
        return client.create_flow_run(load("pipeline"), state=states.Running())

    first, second = ask(left), ask(left)
    run.write_state({**run.state(), "flow_runs": [str(first.id), str(second.id), str(uuid.uuid4())]})
    state = run_flow(load("pipeline"), run=str(run.path))
    for before in (first, second):
        found = ask(lambda client, before=before: client.read_flow_run(before.id)).state
        assert found.is_crashed()
        assert f"flow run {flow_run_id(state)} has resumed run {run.run_id}" in found.message
    assert run.state()["flow_runs"] == [str(flow_run_id(state))]
    assert read_flow_run(state).state.is_completed()


def test_dflop_cancel_closes_a_flow_run_whose_driver_was_killed(run):
    from prefect import states

    left = ask(lambda client: client.create_flow_run(load("pipeline"), state=states.Running()))
    run.write_state({**run.state(), "flow_runs": [str(left.id)]})
    close_left(run, "Cancelled", "cancelled by dflop cancel")
    state = ask(lambda client: client.read_flow_run(left.id)).state
    assert (state.is_cancelled(), state.message) == (True, "cancelled by dflop cancel")
    assert "flow_runs" not in run.state()


def test_a_parameter_that_no_flow_has_is_a_failure_that_names_those_it_has():
    """Prefect ends its process before the flow begins, and calls what a flow has for crashes."""
    flow = load("pipeline")
    mistyped = ask(lambda client: client.create_flow_run(flow, parameters={"confg_path": "run.yaml"}))
    module("flow_run").note_crash(flow, mistyped, None)
    state = ask(lambda client: client.read_flow_run(mistyped.id)).state
    assert state.is_failed()
    assert "unknown parameter `confg_path`" in state.message
    assert "did you mean `config_path`? valid: config, config_path, overrides, run" in state.message


def test_notifications_are_automations_that_the_server_takes_once_with_the_block_that_is_named():
    from prefect.blocks.notifications import CustomWebhookNotificationBlock

    with pytest.raises(ConfigError, match="has no block `custom-webhook/nobody`"):
        asyncio.run(create_automations("custom-webhook/nobody"))
    block = CustomWebhookNotificationBlock(name="ops", url="http://127.0.0.1:9", json_data={"text": "{{body}}"})
    block_id = block.save("ops", overwrite=True)
    for _ in range(2):
        asyncio.run(create_automations("custom-webhook/ops"))
    found = {automation.name: automation for automation in ask(lambda client: client.read_automations())}
    about = ["a run failed", "a run was abandoned", "another plan would pay", "flow runs that fell silent"]
    assert sorted(found) == [f"dflop: {name}" for name in about]
    for name in about[:3]:
        (action,) = found[f"dflop: {name}"].actions
        assert action.block_document_id == block_id


def test_what_cannot_be_meant_fails_a_flow_that_has_no_run(fake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = run_flow(load("plan"), config_path="configs/nowhere.yaml")
    assert isinstance(error_of(state), ConfigError)
    assert not (tmp_path / "runs").exists()


def test_a_fault_of_ours_is_raised(fake, run):
    fake.errors["plan"] = [ZeroDivisionError("a fault of ours")]
    assert isinstance(error_of(run_flow(load("plan"), run=str(run.path))), ZeroDivisionError)
    assert run.state()["state"] == lifecycle.FAILED
    assert driver_of(run) is None


def test_a_finished_run_is_left_as_it_is(fake, tmp_path, log):
    run = make_run(tmp_path, state=lifecycle.DONE)
    before = run.state()
    assert run_flow(load("pipeline"), run=str(run.path)).is_completed()
    assert "is finished, nothing to do" in log.text
    assert (fake.calls, run.state()) == ([], before)


def test_what_cannot_be_shown_was_done_all_the_same(fake, run, monkeypatch, log):
    def broken(_run: Any) -> None:
        raise ConfigError("no tables")

    monkeypatch.setattr("dflop.steps.reporting.cost_rows", broken)
    assert run_flow(load("plan"), run=str(run.path)).is_completed()
    assert "cannot be shown: no tables" in log.text
