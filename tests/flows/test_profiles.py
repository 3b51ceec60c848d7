from __future__ import annotations

from tests.flows.loading import artifacts, flow_run_id, load, run_flow
from tests.jobs.made import make_run


def test_dataset_and_modules_are_profiled_and_shown(server, fake, run):
    state = run_flow(load("profile"), run=str(run.path))
    assert state.is_completed()
    assert fake.calls == ["data_profile", "model_profile"]
    (table,) = artifacts(flow_run_id(state))["dflop-data-profile"]
    assert table.data == '[{"group": "all", "p50_tokens": 12}]'


def test_a_demo_makes_its_dataset_first(server, fake, tmp_path):
    run = make_run(tmp_path, "small-1", "ready", "dataset.demo=true")
    assert run_flow(load("profile"), run=str(run.path)).is_completed()
    assert fake.calls == ["demo_data", "data_profile", "model_profile"]


def test_modules_are_not_profiled_for_a_dataset_that_cannot_be_read(server, fake, run):
    from dflop.errors import DataError

    fake.errors["data_profile"] = DataError("too much of it is unusable")
    assert run_flow(load("profile"), run=str(run.path)).is_failed()
    assert fake.calls == ["data_profile"]
