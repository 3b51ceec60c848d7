from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Cancelling

from dflop.errors import LaunchError
from dflop.jobs import parts, runs
from tests.flows.loading import load, module, read_flow_run, run_flow

hearing = module("hearing")


@pytest.mark.parametrize("told", [Cancelling, Cancelled])
def test_a_flow_run_that_nobody_listens_for_hears_its_cancellation(server, fake, run, monkeypatch, log, told):
    """As that of `dflop run`, or of a worker whose listener gave up in an outage."""
    monkeypatch.setattr(hearing, "EVERY_S", 0.1)

    async def train(drive: Any) -> None:
        context = FlowRunContext.get()
        assert context is not None
        assert context.flow_run is not None
        async with get_client() as client:
            await client.set_flow_run_state(context.flow_run.id, told(), force=True)
        while not drive.run.is_cancelled():
            await asyncio.sleep(0.05)
        raise LaunchError("job `train` (local 7) cancelled")

    monkeypatch.setattr(parts, "train", train)
    state = run_flow(load("train"), run=str(run.path))
    assert state.is_cancelled()
    assert read_flow_run(state).state.is_cancelled()
    assert "the flow run is cancelled" in log.text
    assert run.state()["state"] == runs.CANCELLED


def test_a_server_that_is_away_cancels_nothing(server, fake, run, monkeypatch):
    monkeypatch.setattr(hearing, "EVERY_S", 0.01)

    async def train(_drive: Any) -> None:
        with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
            async with hearing.hears_cancel(FlowRunContext.get().flow_run.id, run, print):
                await asyncio.sleep(0.5)

    monkeypatch.setattr(parts, "train", train)
    assert run_flow(load("train"), run=str(run.path)).is_completed()
    assert not run.is_cancelled()
