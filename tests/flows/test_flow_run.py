"""What parameters of a flow mean, and what a flow offers, without any server."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dflop.cli.server import load_flow
from dflop.config import Config
from dflop.errors import ConfigError
from dflop.run.directory import RunDir
from tests.flows.loading import load, module
from tests.jobs.configs import make_config, make_dataset, write_config
from tests.jobs.made import add_job, make_run


def run_meant(config: Config | None = None, path: str = "", *overrides: str, run: str = "") -> RunDir:
    return module("flow_run")._run_meant(config, path, overrides, run, print)


def test_a_configuration_may_be_typed_or_a_file(tmp_path):
    make_dataset(tmp_path)
    path = str(write_config(tmp_path))
    typed, of_file = run_meant(make_config(tmp_path)), run_meant(None, path)
    assert typed.path == of_file.path, "the same configuration, the same run"
    other = run_meant(None, path, "train.num_steps=7")
    assert other.config().train.num_steps == 7
    assert len(list((tmp_path / "runs").glob("[!.]*"))) == 2


def test_runs_are_looked_for_where_they_are(tmp_path, monkeypatch):
    """In DFLOP_RUNS, or where the configuration that is given has its runs; not in ./runs of a worker."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = make_run(tmp_path)
    with pytest.raises(ConfigError, match="no run `small`"):
        run_meant(run="small")
    assert run_meant(None, str(write_config(tmp_path)), run="small").path == run.path
    monkeypatch.setenv("DFLOP_RUNS", str(tmp_path / "runs"))
    assert run_meant(run="latest").path == run.path


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
        run_meant(**given)
    with pytest.raises(ConfigError, match="`overrides` are for a file"):
        run_meant(make_config(tmp_path), "", "a.b=1")
    assert not (tmp_path / "runs").exists()


def test_a_mistyped_parameter_or_key_is_refused(tmp_path):
    from prefect.exceptions import ParameterTypeError, SignatureMismatchError

    flow, typed = load("pipeline"), make_config(tmp_path).model_dump(mode="json")
    assert flow.validate_parameters({"config": typed})["config"] == make_config(tmp_path)
    with pytest.raises(SignatureMismatchError, match="confg_path"):
        flow.validate_parameters({"confg_path": "run.yaml"})
    with pytest.raises(ParameterTypeError, match="trian"):
        flow.validate_parameters({"config": {**typed, "trian": {}}})
    path = write_config(tmp_path)
    with pytest.raises(ConfigError, match="unknown key `num_stps`") as caught:
        run_meant(None, str(path), "train.num_stps=9")
    assert "did you mean `num_steps`" in caught.value.hint


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
    assert "run small-1 has lost its driver; its jobs go on" in capsys.readouterr().out


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
    assert "the run goes on: OSError: nobody answers" in lines[0]
