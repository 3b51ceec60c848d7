"""What parameters of a flow mean, and what a flow offers, without any server."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from dflop.config import Config
from dflop.errors import ConfigError
from dflop.run.directory import RunDir
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
    assert len(list((tmp_path / "runs").glob("[!.]*"))) == 2


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
