import logging
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflop.records import ProfileRecord
from dflop.run.directory import RunDir
from dflop.steps import next_plan, planning, profiling, reporting, training
from dflop.steps.follow import Listener
from dflop.steps.profiling import DataKey
from dflop.steps.training import Trained
from dflop.views import run_results
from tests.flows.loading import module
from tests.jobs.made import make_run
from tests.jobs.played import PLANS


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Prefect server of the tests' own. It costs 20 s: what needs it is in `test_flows.py`, which one worker runs."""
    from prefect.settings import PREFECT_LOCAL_STORAGE_PATH, temporary_settings  # a second of every collection
    from prefect.testing.utilities import prefect_test_harness

    results = {PREFECT_LOCAL_STORAGE_PATH: tmp_path_factory.mktemp("results")}
    with prefect_test_harness(server_startup_timeout=180), temporary_settings(results):
        yield


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What prepares this process for a server would else reach the processes that later tests start."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path, "small-1", "ready", "compare.num_batches=0")


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


class Steps:
    """Stands in for the steps of a run: they note that they were called, and nothing is profiled or trained."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.errors: dict[str, list[Exception]] = {}
        self.trained = [Trained(40, is_over=True)]
        """What training jobs leave, one after the other; the first is how far the run is before."""
        self.keys = {kind: uuid.uuid4().hex for kind in ("data", "model")}
        self.stored: set[str] = set()

    def called(self, name: str, say: Callable[[str], None]) -> None:
        self.calls.append(name)
        say(f"{name} says a line")
        if self.errors.get(name):
            raise self.errors[name].pop(0)

    def profile(self, kind: str) -> Any:
        async def profile(_run: RunDir, _launcher: Any, to: Listener, *_: Any) -> ProfileRecord:
            self.called(f"profile {kind}", to.say)
            to.progress(50.0, "1 done, 1 running")
            self.stored.add(self.keys[kind])
            return ProfileRecord(self.keys[kind], kind, "small-1", "{}", 9, 0, 1.0, 2.0)

        return profile

    def plan(self, _run: RunDir, _launcher: Any, _advice: Any, say: Callable[[str], None], _model: Any) -> Any:
        self.called("plan", say)
        return PLANS

    async def train(self, run: RunDir, _launcher: Any, to: Listener) -> Trained:
        self.called("train", to.say)
        to.progress(100.0, f"done, step {self.trained[0].next_step} of 40")
        return self.trained.pop(0) if len(self.trained) > 1 else self.trained[0]

    async def compare(self, _run: RunDir, _launcher: Any, to: Listener) -> None:
        self.called("compare", to.say)

    def report(self, _run: RunDir, *_: Any) -> Any:
        self.called("report", print)
        return SimpleNamespace(verdict="nothing was trained")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Steps:
    found = Steps()

    async def ingest(*_: Any) -> None:
        """Nothing."""

    def so_far(*_: Any) -> Trained:
        return found.trained.pop(0) if len(found.trained) > 1 else found.trained[0]

    monkeypatch.setattr(profiling, "data_profile_key", lambda *_: DataKey(found.keys["data"], {}))
    monkeypatch.setattr(profiling, "stored_profile", lambda _, key: key if key in found.stored else None)
    monkeypatch.setattr(profiling, "is_profiled", lambda _: found.keys["model"] in found.stored)
    monkeypatch.setattr(profiling, "take_samples", lambda *_: None)
    monkeypatch.setattr(planning, "model_profile_key", lambda _: (found.keys["model"], "cpu", {}))
    for kind in ("data", "model"):
        monkeypatch.setattr(profiling, f"profile_{kind}", found.profile(kind))
    monkeypatch.setattr(next_plan, "next_plan", found.plan)
    monkeypatch.setattr(training, "trained_so_far", so_far)
    monkeypatch.setattr(training, "train", found.train)
    monkeypatch.setattr(training, "compare", found.compare)
    monkeypatch.setattr(run_results, "write_report", found.report)
    monkeypatch.setattr(reporting, "data_rows", lambda run: [{"group": "all", "p50_tokens": 12}])
    monkeypatch.setattr(reporting, "cost_rows", lambda run: [{"module": "llm", "noise": float("nan")}])
    monkeypatch.setattr(reporting, "plan_page", lambda run, plans: "why\n\n![a step](data:image/png;base64,AAAA)")
    monkeypatch.setattr(reporting, "summary_page", lambda run, summary: f"# {summary.verdict}")
    monkeypatch.setattr(module("page"), "history_page", lambda run: "nothing happened")
    monkeypatch.setattr(module("tasks"), "ingest_run", ingest)
    for name in ("profile_data", "profile_model", "train", "compare"):
        monkeypatch.setattr(getattr(module("tasks"), name), "retry_delay_seconds", 0)
    return found
