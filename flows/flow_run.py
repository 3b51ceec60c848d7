"""A flow run and the run that it drives: what its parameters mean, how it is found again, cancelled and noted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import UUID

from prefect import Flow, get_run_logger, states
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run as this_flow_run
from rich.console import Console

from dflop import errors
from dflop.config import Config, validated_config
from dflop.errors import ConfigError, DflopError, did_you_mean
from dflop.run import lifecycle
from dflop.run.cancel import as_cancelled, cancel_run
from dflop.run.directory import RunDir, open_run
from dflop.run.driver_lock import driver_of
from dflop.run.messages import Say
from dflop.steps.session import driver_session, finished_text, run_meant

RUN_DIR_LABEL = "dflop.run_dir"
"""Label of a flow run with the run directory, by which its jobs are found when it is cancelled, wherever it is."""
HEAR_EVERY_S = 10.0
TIMEOUT_S = 15.0
_PARAMETERS = """

    Args:
        config: Configuration of a new run, or of the unfinished run with the same one.
        config_path: YAML file to read it from, where `config` is left empty.
        overrides: `a.b=value`, for the file.
        run: Run to resume (directory, id, beginning of an id, `latest`), in place of both.
"""


class StrictFlow(Flow[..., Any]):
    """A flow that refuses what it does not know, with the nearest name that it does."""

    def validate_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Parameters as the flow takes them.

        Raises:
            ConfigError: a name, or a key of the configuration, is unknown.
        """
        for name in parameters.keys() - self.parameters.properties.keys():
            hint = did_you_mean(name, self.parameters.properties)
            raise ConfigError(f"unknown parameter `{name}`", where=f"parameters of {self.name}", hint=hint)
        if isinstance(parameters.get("config"), dict):
            parameters = {**parameters, "config": validated_config(parameters["config"], "parameters: config")}
        return super().validate_parameters(parameters)


def drives(name: str) -> Callable[[Callable[[RunDir], Awaitable[Any]]], Flow[..., Any]]:
    """A flow of this name: starts or resumes the run that its parameters name, and drives it."""

    def flow_of(steps: Callable[[RunDir], Awaitable[Any]]) -> Flow[..., Any]:
        async def drive(
            config: Config | None = None, config_path: str = "", overrides: tuple[str, ...] = (), run: str = ""
        ) -> Any:
            plain_logs()
            say = get_run_logger().info
            found = await asyncio.to_thread(run_meant, config, config_path, overrides, run, say=say)
            if lifecycle.is_finished(found):
                say(finished_text(found))
                return states.Completed(message=finished_text(found))
            try:
                async with _driving(found, say):
                    return await steps(found)
            except errors.Cancelled as error:
                say(str(error))
                return states.Cancelled(message=as_cancelled(found).what, data=as_cancelled(found))

        # By these names Prefect finds the flow in its file.
        drive.__module__, drive.__name__, drive.__qualname__ = steps.__module__, steps.__name__, steps.__name__
        drive.__doc__ = f"{steps.__doc__}{_PARAMETERS}"
        return StrictFlow(drive, name=name, on_cancellation=[empty_the_queue], on_crashed=[note_crash])

    return flow_of


@contextlib.asynccontextmanager
async def _driving(run: RunDir, say: Say) -> AsyncIterator[None]:
    """Drive a run for the length of the block, under its name, and hear whether the flow run is cancelled."""
    config, flow_run_id = run.config(), UUID(this_flow_run.id)
    tags = {*this_flow_run.tags, "dflop", config.name, f"cluster:{config.cluster.name}"}
    with contextlib.suppress(Exception):  # a server that is away costs the name of its page
        async with asyncio.timeout(TIMEOUT_S), get_client() as client:
            await client.update_flow_run(flow_run_id, name=run.run_id, tags=sorted(tags))
            await client.update_flow_run_labels(flow_run_id, {RUN_DIR_LABEL: str(run.path)})
    listening = asyncio.create_task(_hear_cancel(flow_run_id, run, say), name="hear-cancel")
    try:
        async with driver_session(run, say):
            yield
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def _hear_cancel(flow_run_id: UUID, run: RunDir, say: Say) -> None:
    """Empties the queue of a flow run that is cancelled; its driver then sees its job cancelled, and ends.

    `dflop serve` and workers listen for their flows, but nobody does for the flow of `dflop run`.
    """
    is_told = False
    while not is_told:
        await asyncio.sleep(HEAR_EVERY_S)
        with contextlib.suppress(Exception):  # whatever a client, a proxy or a server comes up with: it is asked again
            # A client of its own: the flow's would try for minutes to reach a server that is gone.
            async with asyncio.timeout(TIMEOUT_S), get_client(httpx_settings={"timeout": TIMEOUT_S}) as client:
                state = (await client.read_flow_run(flow_run_id)).state
                is_told = state is not None and (state.is_cancelling() or state.is_cancelled())
    say("the flow run is cancelled")
    try:
        await asyncio.to_thread(cancel_run, run, say)
    except DflopError as error:
        say(str(error))


def empty_the_queue(flow: Any, flow_run: Any, state: Any) -> None:
    """Cancel what a cancelled flow run has left in the queue; Prefect calls it, by these names of its arguments."""
    if (run := _driven_by(flow_run)) is not None:
        cancel_run(run, print)


def note_crash(flow: Any, flow_run: Any, state: Any) -> None:
    """Say what becomes of the run of a flow that ended without a word; Prefect calls it."""
    run = _driven_by(flow_run)
    if run is not None and run.state().get("state") == lifecycle.RUNNING and driver_of(run) is None:
        print(f"run {run.run_id} has lost its driver; its jobs continue, and dflop train {run.path} adopts them")


def _driven_by(flow_run: Any) -> RunDir | None:
    labels = flow_run.labels
    if RUN_DIR_LABEL not in labels:  # as the flow run was when it began
        with get_client(sync_client=True) as client:
            labels = client.read_flow_run(flow_run.id).labels
    return open_run(str(labels[RUN_DIR_LABEL])) if RUN_DIR_LABEL in labels else None


class _ThreeLines(logging.Filter):
    """An error of ours says what to do; a traceback above it says nothing. Of one that is retried, a line is enough."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], DflopError):
            record.msg, record.args, record.exc_info = str(record.exc_info[1]), (), None
        elif isinstance(args := record.args, tuple) and any(isinstance(arg, DflopError) for arg in args):
            record.args = tuple(arg.what.splitlines()[0] if isinstance(arg, DflopError) else arg for arg in args)
            record.msg = record.msg.replace("%r", "%s")
        return True


_THREE_LINES = _ThreeLines()


def plain_logs() -> None:
    """Errors of ours are logged as they are; lines that nobody reads any more end no flow."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_THREE_LINES)
    Console.on_broken_pipe = lambda self: None  # type: ignore[method-assign]  # it has no other switch
