"""Flows and their neighbours, loaded by path as deployments load them, and what their pages show.

Prefect is imported in functions: it takes a second, of every collection of tests.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parents[2] / "flows"


def load(name: str) -> Any:
    """The flow of this name, one object for all tests: flows that call each other import it as a module."""
    from dflop.cli.run import FLOWS

    return getattr(module(FLOWS[name].removesuffix(".py")), name)


def load_by_path(name: str) -> Any:
    from dflop.cli.run import FLOWS
    from dflop.cli.server import load_flow

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


def ask(question: Callable[[Any], Awaitable[Any]]) -> Any:
    """What a client of the server is answered."""
    from prefect.client.orchestration import get_client

    async def answer() -> Any:
        async with get_client() as client:
            return await question(client)

    return asyncio.run(answer())


def read_flow_run(state: Any) -> Any:
    """The flow run that ended in a state, as the server has it."""
    return ask(lambda client: client.read_flow_run(flow_run_id(state)))


def artifacts(run_id: Any) -> dict[str, list[Any]]:
    """What is on the page of a flow run, by key, oldest first."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    wanted = FlowRunFilter(id=FlowRunFilterId(any_=[run_id]))
    found: dict[str, list[Any]] = {}
    for artifact in sorted(ask(lambda client: client.read_artifacts(flow_run_filter=wanted)), key=lambda a: a.created):
        found.setdefault(artifact.key, []).append(artifact)
    return found


def flow_names() -> list[str]:
    """Names of all flows that have run on the server, with repetitions, oldest first."""
    runs = ask(lambda client: client.read_flow_runs(limit=200))
    flows = {flow.id: flow.name for flow in ask(lambda client: client.read_flows(limit=200))}
    return [flows[run.flow_id] for run in sorted(runs, key=lambda r: r.created)]
