from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from dflop.jobs.rounds import Teller
from dflop.jobs.rundir import RunDir
from tests.jobs.played import PLANS, configured_run


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

    async def tell(_: Teller) -> None:
        """Nothing."""

    monkeypatch.setattr(Teller, "tell", tell)
