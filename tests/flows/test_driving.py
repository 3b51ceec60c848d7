"""What parameters of a flow mean, and what a flow offers, without any server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from types import SimpleNamespace
from typing import Any

import pytest

from dflop.config import Config
from dflop.errors import ConfigError
from dflop.jobs.rundir import RunDir
from tests.flows.loading import load, load_by_path, module
from tests.jobs.configs import make_config, make_dataset, write_config


def run_meant(said: list[str], config: Config | None = None, path: str = "", *overrides: str, run: str = "") -> RunDir:
    return module("driving")._run_meant(config, path, overrides, run, said.append)


def test_a_configuration_may_be_typed_or_a_file(tmp_path):
    make_dataset(tmp_path)
    path = str(write_config(tmp_path))
    typed, of_file = run_meant([], make_config(tmp_path)), run_meant([], None, path)
    assert typed.path == of_file.path, "the same configuration, the same run"
    other = run_meant([], None, path, "train.num_steps=7")
    assert other.config().train.num_steps == 7
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_a_default_path_does_not_keep_anybody_from_the_form(tmp_path):
    make_dataset(tmp_path)
    said: list[str] = []
    run = run_meant(said, make_config(tmp_path, "train.num_steps=9"), "configs/demo.yaml")
    assert run.config().train.num_steps == 9
    assert any("configs/demo.yaml) is not read" in line for line in said)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({}, "which run\\? the flow was given no configuration"),
        ({"run": "nowhere"}, "no run `nowhere`"),
        ({"path": "nowhere.yaml"}, "cannot read the configuration"),
    ],
)
def test_what_cannot_be_meant_is_said(tmp_path, monkeypatch, given, what):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=what):
        run_meant([], **given)
    with pytest.raises(ConfigError, match="`overrides` are for a file"):
        run_meant([], make_config(tmp_path), "", "a.b=1")
    assert not (tmp_path / "runs").exists()


def test_before_its_run_is_known_a_flow_run_is_named_by_what_it_was_given(monkeypatch, tmp_path):
    driving = module("driving")
    named: dict[str, dict[str, Any]] = {
        "?": {},
        "nowhere": {"config_path": "configs/nowhere.yaml"},
        "demo-1": {"run": "runs/demo-1", "config": {"name": "other"}},
        "typed": {"config": {"name": "typed"}, "config_path": "configs/demo.yaml"},
        "small": {"config": make_config(tmp_path)},
    }
    for name, given in named.items():
        monkeypatch.setattr(driving, "this_flow_run", SimpleNamespace(parameters=given))
        assert driving.flow_run_name() == name


def test_the_form_is_the_typed_configuration():
    from prefect.utilities.callables import parameter_schema

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


def test_every_flow_loads_by_its_path_and_empties_its_queue_when_it_is_cancelled():
    for name in ("pipeline", "campaign", "profile", "plan", "train", "report"):
        assert load_by_path(name).name == f"dflop-{name}"
        hooks = [] if name == "report" else [module("driving").empty_the_queue]
        assert load(name).on_cancellation_hooks == hooks, name


def test_a_server_that_is_away_cancels_nothing(monkeypatch):
    hearing, asked, cancelled, states = module("hearing"), list[int](), list[Any](), list[Any]()

    async def read_flow_run(_: Any) -> Any:
        if not states:
            raise OSError("nobody answers")
        return SimpleNamespace(state=states[0])

    client = SimpleNamespace(read_flow_run=read_flow_run)
    monkeypatch.setattr(hearing, "EVERY_S", 0.001)
    monkeypatch.setattr(hearing, "get_client", lambda **_: asked.append(1) or contextlib.nullcontext(client))
    monkeypatch.setattr(hearing, "cancel_run", lambda run, say: cancelled.append(run))

    async def listen() -> None:
        async with hearing.hears_cancel("a flow run", "a run", print):
            while len(asked) < 3:
                await asyncio.sleep(0)

    asyncio.run(listen())
    assert cancelled == []
    states.append(SimpleNamespace(is_cancelling=lambda: False, is_cancelled=lambda: True))
    asyncio.run(hearing._listen("a flow run", "a run", print))
    assert cancelled == ["a run"]
