"""Flows and their neighbours, loaded by path as deployments load them, and what their pages show.

Prefect is imported in functions: it takes a second, of every collection of tests.
"""

import asyncio
import importlib
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.launch.helpers import until

FOLDER = Path(__file__).parents[2] / "flows"


def load(name: str) -> Any:
    """The flow of this name, one object for all tests."""
    return getattr(module("pipeline"), name)


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


def task_runs(state: Any) -> list[Any]:
    """Task runs of the flow run that ended in a state, as the server has them, in the order of their beginning.

    They reach it as events, behind the flow run's own state.
    """
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    wanted = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id(state)]))

    def found() -> list[Any]:
        runs = ask(lambda client: client.read_task_runs(flow_run_filter=wanted))
        return runs if runs and all(run.state is not None and run.state.is_final() for run in runs) else []

    runs = until(found, what="the ends of all task runs")
    return sorted(runs, key=lambda run: run.start_time or run.expected_start_time)
