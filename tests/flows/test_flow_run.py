"""What parameters of a flow mean, and what a flow offers, without any server."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dflop.cli.server import load_flow
from dflop.errors import ConfigError
from dflop.run.directory import RunDir
from tests.flows.loading import load, module
from tests.jobs.configs import make_config
from tests.jobs.made import add_job, make_run


def test_a_mistyped_parameter_or_key_is_refused_with_the_nearest_that_there_is(tmp_path):
    flow, typed = load("pipeline"), make_config(tmp_path).model_dump(mode="json")
    assert flow.validate_parameters({"config": typed})["config"] == make_config(tmp_path)
    for given, what, hint in (
        ({"confg_path": "run.yaml"}, "unknown parameter `confg_path`", "did you mean `config_path`"),
        ({"config": {**typed, "trian": {}}}, "unknown key `trian`", "did you mean `train`"),
    ):
        with pytest.raises(ConfigError, match=what) as caught:
            flow.validate_parameters(given)
        assert hint in caught.value.hint


def test_every_flow_loads_by_its_path_and_what_drives_has_hooks():
    flow_run = module("flow_run")
    for name in ("pipeline", "profile", "plan", "train", "report"):
        assert load_flow(name).name == f"dflop-{name}"
        flow, drives = load(name), name != "report"
        assert flow.on_cancellation_hooks == [flow_run.empty_the_queue] * drives
        assert flow.on_crashed_hooks == [flow_run.note_crash] * drives


def test_a_run_is_found_by_the_label_of_its_flow_run_wherever_it_is(tmp_path, monkeypatch, capsys):
    run, flow_run, cancelled = make_run(tmp_path, state="running"), module("flow_run"), list[RunDir]()
    add_job(run, "train")
    labelled = SimpleNamespace(labels={flow_run.RUN_DIR_LABEL: str(run.path)})
    monkeypatch.setattr(flow_run, "cancel_run", lambda found, say: cancelled.append(found))
    flow_run.empty_the_queue(None, labelled, None)
    assert [found.path for found in cancelled] == [run.path]
    flow_run.note_crash(None, labelled, None)
    assert "run small-1 has lost its driver; its jobs continue" in capsys.readouterr().out


def test_a_server_that_is_away_costs_the_page_and_is_said_once(run, monkeypatch):
    page_module, lines = module("page"), list[str]()

    async def away(*_: Any) -> None:
        raise OSError("nobody answers")

    for name in ("markdown", "table", "progress"):
        monkeypatch.setattr(page_module, f"acreate_{name}_artifact", away)
    monkeypatch.setattr(page_module, "history_page", lambda run: "nothing happened")
    monkeypatch.setattr(page_module, "get_run_logger", lambda: SimpleNamespace(info=lines.append))
    add_job(run, "train")

    async def main() -> None:
        async with page_module.Page("train", run) as page:
            page.progress(50.0, "running, step 1 of 2")
            await page.markdown("plan", lambda: "a plan", description="")
            page.progress(100.0, "done")

    asyncio.run(main())
    assert len(lines) == 1
    assert "the run continues: OSError: nobody answers" in lines[0]
