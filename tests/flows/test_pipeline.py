from __future__ import annotations

import json

from prefect.utilities.callables import parameter_schema

from dflop.config import Config
from dflop.jobs import runs
from dflop.jobs.continuing import Todo
from tests.flows.loading import artifacts, flow_names, flow_run_id, load, load_by_path, run_flow
from tests.flows.test_reports import summarised
from tests.jobs.made import make_run


def test_the_parts_come_in_order_and_everything_is_on_one_page(server, fake, run, monkeypatch):
    load("pipeline")
    summarised(monkeypatch)
    fake.todo = [Todo.PLAN, Todo.TRAIN]
    before = len(flow_names())
    state = run_flow(load("pipeline"), run=str(run.path))
    assert state.is_completed(), state
    assert fake.calls == ["data_profile", "model_profile", "plan", "train", "compare", "report"]
    assert run.state()["state"] == runs.DONE
    names = ["dflop-pipeline", "dflop-profile", "dflop-plan", "dflop-train", "dflop-report"]
    assert flow_names()[before:] == names
    shown = artifacts(flow_run_id(state))
    assert {"dflop-data-profile", "dflop-model-profile", "dflop-plan", "dflop-summary", "dflop-report"} <= set(shown)


def test_no_comparison_is_trained_where_none_is_wanted(server, fake, tmp_path, monkeypatch):
    load("pipeline")
    summarised(monkeypatch)
    run = make_run(tmp_path, "small-1", "ready", "compare.num_batches=0")
    assert run_flow(load("pipeline"), run=str(run.path)).is_completed()
    assert "compare" not in fake.calls
    assert run.state()["state"] == runs.DONE


def test_a_report_that_cannot_be_written_undoes_no_training(server, fake, run, monkeypatch):
    from dflop.errors import StoreError

    fake.errors["report"] = StoreError("no space")
    state = run_flow(load("pipeline"), run=str(run.path))
    assert state.is_failed()
    assert run.state()["state"] == runs.DONE


def test_the_form_is_the_typed_configuration():
    schema = parameter_schema(load("pipeline")).model_dump()
    assert schema["required"] == []
    assert set(schema["properties"]) == {"config", "config_path", "overrides", "run"}
    wanted = Config.model_json_schema()
    found = schema["definitions"]["Config"]
    assert set(found["properties"]) == set(wanted["properties"])
    assert {"TrainConfig", "ClusterConfig", "SlurmConfig", "DatasetConfig"} <= set(schema["definitions"])
    for name, kind in (("config_path", "string"), ("run", "string"), ("overrides", "array")):
        assert schema["properties"][name]["type"] == kind
        assert schema["properties"][name]["description"]
    assert "default" in json.dumps(schema["properties"]["config"])


def test_every_flow_loads_by_its_path():
    for name in ("pipeline", "campaign", "profile", "plan", "train", "report"):
        assert load_by_path(name).name == f"dflop-{name}"
