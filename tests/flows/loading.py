"""Flows and their neighbours, loaded by path as deployments load them, and what their pages show."""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

from dflop.cli.drive import FLOWS
from dflop.cli.server import load_flow

FOLDER = Path(__file__).parents[2] / "flows"


def load(name: str) -> Any:
    """The flow of this name, one object for all tests: flows that call each other import it as a module."""
    return getattr(module(FLOWS[name].removesuffix(".py")), name)


def load_by_path(name: str) -> Any:
    return load_flow(FLOWS[name], name)


def module(name: str) -> ModuleType:
    """A file of `flows/`, found beside the others as Prefect arranges it."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def run_flow(flow: Any, **parameters: Any) -> Any:
    """The final state of a run of the flow."""
    return asyncio.run(flow(**parameters, return_state=True))


def flow_run_id(state: Any) -> Any:
    return state.state_details.flow_run_id


def read_flow_run(state: Any) -> Any:
    """The flow run that ended in a state, as the server has it."""

    async def read() -> Any:
        async with get_client() as client:
            return await client.read_flow_run(flow_run_id(state))

    return asyncio.run(read())


def artifacts(run_id: Any) -> dict[str, list[Any]]:
    """What is on the page of a flow run, by key, oldest first."""

    async def read() -> Any:
        async with get_client() as client:
            return await client.read_artifacts(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])))

    found: dict[str, list[Any]] = {}
    for artifact in sorted(asyncio.run(read()), key=lambda a: a.created):
        found.setdefault(artifact.key, []).append(artifact)
    return found


def flow_names() -> list[str]:
    """Names of all flows that have run on the server, with repetitions, oldest first."""

    async def read() -> list[str]:
        async with get_client() as client:
            runs = await client.read_flow_runs(limit=200)
            flows = {flow.id: flow.name for flow in await client.read_flows(limit=200)}
            return [flows[run.flow_id] for run in sorted(runs, key=lambda r: r.created)]

    return asyncio.run(read())
