from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflop.run.directory import RunDir
from dflop.steps import continuing, parts, plan_page
from dflop.steps.continuing import Todo
from dflop.steps.drive import Drive
from dflop.views import run_results
from tests.jobs.made import make_run


@pytest.fixture(scope="session")
def server() -> Iterator[None]:
    """A Prefect server of the tests' own. It costs 20 s: what needs it is in `test_flows.py`, which one worker runs."""
    from prefect.testing.utilities import prefect_test_harness  # a second of every collection

    with prefect_test_harness(server_startup_timeout=180):
        yield


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What flows and tasks say: Prefect's loggers hand nothing on to others."""
    from prefect.logging.configuration import setup_logging

    setup_logging()  # the first flow would, and replace handlers
    loggers = [logging.getLogger(f"prefect.{kind}_runs") for kind in ("flow", "task")]
    for logger in loggers:
        logger.addHandler(caplog.handler)
    yield caplog
    for logger in loggers:
        logger.removeHandler(caplog.handler)


class Parts:
    """Stands in for the parts of a run: they note that they were called, and nothing is profiled or trained."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.todo: list[Todo] = []
        self.errors: dict[str, Exception] = {}

    def part(self, name: str, result: Any = None) -> Any:
        async def called(drive: Drive) -> Any:
            drive.check()
            self.calls.append(name)
            if self.todo and self.todo[0].value == name:
                self.todo.pop(0)
            drive.say(f"{name} says a line")
            if name in self.errors:
                raise self.errors[name]
            return result

        return called

    def what_next(self, _run: RunDir, _launcher: Any) -> Todo:
        return self.todo[0] if self.todo else Todo.NOTHING


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Parts:
    found, summary = Parts(), SimpleNamespace(verdict="nothing was trained")
    for name in ("demo_data", "data_profile", "model_profile", "train", "compare"):
        monkeypatch.setattr(parts, name, found.part(name))
    monkeypatch.setattr(parts, "plan", found.part("plan", (SimpleNamespace(reason="it is the best"),)))
    monkeypatch.setattr(parts, "report", found.part("report", summary))
    monkeypatch.setattr(parts, "report_again", lambda run, say: found.calls.append("report again") or summary)
    monkeypatch.setattr(continuing, "what_next", found.what_next)
    monkeypatch.setattr(plan_page, "data_rows", lambda run: [{"group": "all", "p50_tokens": 12}])
    monkeypatch.setattr(plan_page, "cost_rows", lambda run: [{"module": "llm", "noise": float("nan")}])
    monkeypatch.setattr(plan_page, "plan_page", lambda run, plans: "why\n\n![a step](data:image/png;base64,AAAA)")
    monkeypatch.setattr(run_results, "load_history", lambda store, run_id: [])
    return found
