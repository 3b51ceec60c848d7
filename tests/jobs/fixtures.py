"""Fixtures of the rooms that drive runs and their jobs: a run whose jobs are played, a planned one, a finished one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflop.run.directory import RunDir
from dflop.steps import training
from tests.data.conftest import shared_media, tokenizer_path  # noqa: F401, fixtures
from tests.jobs.finished import finished_run
from tests.jobs.played import PLANS, configured_run


@pytest.fixture(scope="session")
def planned(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Of which `fresh` makes copies and `set_config` other runs: what is profiled and planned stays."""
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    from tests.jobs.training import planned_run  # torch, which most tests here do without

    return planned_run(tmp_path_factory.mktemp("planned"), "plan.num_scenarios=2", "plan.top=4", has_jobs=False)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of six steps and a comparison, in a store, of which no process ran."""
    return finished_run(tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="session")
def schedulable(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """What tests of the scheduler process have copies of."""
    from tests.jobs.scheduling import planned_run

    return planned_run(tmp_path_factory.mktemp("schedulable"))


@pytest.fixture
def store() -> Any:
    """A job's key-value store."""
    from dflop.train.wire import open_store

    return open_store("127.0.0.1", 0, is_server=True, timeout_s=20)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunDir]:
    """Makes a run whose jobs are played."""
    return functools.partial(configured_run, tmp_path)


@pytest.fixture
def run(make_run: Callable[..., RunDir]) -> RunDir:
    """With a plan, and no job yet."""
    run = make_run()
    run.write_plan(PLANS[0], [])
    return run


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ingested, which takes a second a round; tests that want it undo this."""

    async def tell(_: training._Rounds) -> None:
        """Nothing."""

    monkeypatch.setattr(training._Rounds, "tell", tell)
