"""What parameters of a flow mean, and what a flow offers, without any server."""

import ast
import asyncio
import inspect
import textwrap
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect.tasks import Task

from dflop.cli.server import load_flow
from dflop.errors import ConfigError
from dflop.run.directory import RunDir
from tests.flows.loading import load, module
from tests.jobs.configs import make_config
from tests.jobs.made import add_job, make_run


def test_a_mistyped_key_is_refused_with_the_nearest_that_there_is(tmp_path):
    flow, typed = load("pipeline"), make_config(tmp_path).model_dump(mode="json")
    assert flow.validate_parameters({"config": typed})["config"] == make_config(tmp_path)
    with pytest.raises(ConfigError, match="unknown key `trian`") as caught:
        flow.validate_parameters({"config": {**typed, "trian": {}}})
    assert "did you mean `train`" in caught.value.hint


def test_every_flow_loads_by_its_path_and_what_drives_has_hooks():
    flow_run = module("flow_run")
    for name in ("pipeline", "profile", "plan", "train", "report"):
        assert load_flow(name).name == f"dflop-{name}"
        flow = load(name)
        assert flow.on_cancellation_hooks == [flow_run.empty_the_queue] * (name != "report")
        assert flow.on_crashed_hooks == [flow_run.note_crash]


def test_a_task_uses_every_value_that_it_takes():
    """What it does not use would be an edge of the graph that means nothing."""
    found = [task for task in vars(module("tasks")).values() if isinstance(task, Task)]
    assert len(found) == 6
    for task in found:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(task.fn))).body
        used = {node.id for statement in function.body for node in ast.walk(statement) if isinstance(node, ast.Name)}
        used |= {"key"} if task.cache_key_fn is not None else set()  # Prefect keeps the result under it
        assert used >= {argument.arg for argument in function.args.args}, task.name


def test_a_run_is_found_by_the_label_of_its_flow_run_wherever_it_is(tmp_path, monkeypatch, capsys):
    run, flow_run, cancelled = make_run(tmp_path, state="running"), module("flow_run"), list[RunDir]()
    add_job(run, "train")
    labelled = SimpleNamespace(labels={flow_run.RUN_DIR_LABEL: str(run.path)}, parameters={"run": "small-1"})
    monkeypatch.setattr(flow_run, "cancel_run", lambda found, say: cancelled.append(found))
    flow_run.empty_the_queue(None, labelled, None)
    assert [found.path for found in cancelled] == [run.path]
    flow_run.note_crash(load("pipeline"), labelled, None)
    assert "run small-1 has lost its driver; its jobs continue" in capsys.readouterr().out


def played(play: Any, lines: list[str], monkeypatch: Any, end_s: float = 0.05) -> None:
    """Play something with an outbox that hardly rests, and at the end waits this long."""
    page = module("page")
    monkeypatch.setattr(page, "RETRY_S", 0.01)
    monkeypatch.setattr(page, "END_S", end_s)

    async def main() -> None:
        async with page.Outbox(lines.append) as found:
            await play(found)

    asyncio.run(main())


def test_a_server_that_is_away_costs_the_page_and_is_said_once(run, monkeypatch):
    page_module, lines = module("page"), list[str]()

    async def away(*_: Any, **__: Any) -> None:
        raise OSError("nobody answers")

    for name in ("markdown", "table", "progress"):
        monkeypatch.setattr(page_module.artifacts, f"acreate_{name}_artifact", away)
    monkeypatch.setattr(page_module, "history_page", lambda run: "nothing happened")
    monkeypatch.setattr(page_module, "get_run_logger", lambda: SimpleNamespace(info=lines.append))
    add_job(run, "train")

    async def play(_: Any) -> None:
        async with page_module.Page("train", run) as page:
            page.progress(50.0, "running, step 1 of 2")
            await page.markdown("plan", lambda: "a plan", description="")
            page.progress(100.0, "done")

    played(play, lines, monkeypatch)
    assert lines == [
        "the Prefect server does not respond, the run continues without it: OSError: nobody answers",
        "the Prefect server did not respond until the end; its page lacks dflop-train-progress, dflop-plan, "
        "dflop-jobs, dflop-history",
    ]


def test_what_a_server_missed_is_sent_in_order_when_it_is_back_and_what_it_refuses_once(monkeypatch):
    sent, lines, num_tries = list[str](), list[str](), 0
    refusal = httpx.HTTPStatusError("too large", request=httpx.Request("POST", "/"), response=httpx.Response(422))

    def send(name: str, error: Exception | None = None) -> Any:
        async def sending() -> None:
            nonlocal num_tries
            num_tries += 1
            if error is not None or num_tries < 3:
                raise error or httpx.ConnectError("refused")
            sent.append(name)

        return sending

    async def play(outbox: Any) -> None:
        for name, what, error in (("a", "a1", None), ("b", "b1", None), ("a", "a2", None), ("c", "c1", refusal)):
            outbox.put(name, send(what, error))

    played(play, lines, monkeypatch, end_s=60)
    assert sent == ["a2", "b1"], "the newest of a name, in the place of the first"
    assert [line.partition(":")[0] for line in lines] == [
        "the Prefect server does not respond, the run continues without it",
        "the Prefect server responds again",
        "cannot be shown",
    ]


def test_a_server_that_accepts_and_never_answers_is_away(monkeypatch):
    lines = list[str]()
    monkeypatch.setattr(module("page"), "TIMEOUT_S", 0.02)

    async def play(outbox: Any) -> None:
        outbox.put("bar", asyncio.Event().wait)

    played(play, lines, monkeypatch)
    assert "its page lacks bar" in lines[-1]
