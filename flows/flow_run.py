"""A flow run and the run that it drives: what its parameters mean, what its server knows, how it is cancelled.

Nothing that a run needs waits for the server: tasks have no tags, for each of which Prefect would ask it for a slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID

from page import TIMEOUT_S, Outbox
from prefect import Flow, get_run_logger, states
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import Abort
from prefect.runtime import flow_run as this_flow_run
from rich.console import Console

from dflop.cli.server import close_flow_runs
from dflop.config import Config
from dflop.errors import Cancelled, ConfigError, DflopError, Stopped, did_you_mean
from dflop.run import lifecycle
from dflop.run.directory import RunDir, open_run
from dflop.run.driver_lock import driver_of
from dflop.run.messages import Say
from dflop.run.queue import as_cancelled, cancel_run
from dflop.steps.session import driver_session, finished_text, run_meant

RUN_DIR_LABEL = "dflop.run_dir"
"""Label of a flow run with the run directory, by which its jobs are found when it is cancelled, wherever it is."""
WATCH_EVERY_S = 10.0
Texts = tuple[str, ...]


async def drive(
    steps: Callable[[RunDir], Awaitable[Any]], config: Config | None, path: str, overrides: Sequence[str], name: str
) -> Any:
    """Start or resume the run that the parameters of a flow name, and drive it through some steps."""
    plain_logs()
    say = get_run_logger().info
    run = await asyncio.to_thread(run_meant, config, path, overrides, name, say=say)
    if lifecycle.is_finished(run):
        say(finished_text(run))
        return states.Completed(message=finished_text(run))
    flow_run_id = UUID(this_flow_run.id)
    watching = asyncio.create_task(_watch(flow_run_id, run, say), name="watch")
    try:
        async with Outbox(say) as outbox, driver_session(run, say):
            _introduce(flow_run_id, run, outbox)
            ended = await steps(run)
        if outbox.is_away:
            raise _not_sent()
        return ended
    except DflopError as error:
        if outbox.is_away:
            raise _not_sent() from error
        if not isinstance(error, Cancelled):
            raise
        shown = error if isinstance(error, Stopped) else as_cancelled(run)
        return states.Cancelled(message=shown.what, data=shown)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def _not_sent() -> Abort:
    """Ends a flow without a word to its server: with a state or an error Prefect would try to reach it for minutes."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it would show how Prefect's polling ends
    return Abort("its flow run stays `Running`")


def _introduce(flow_run_id: UUID, run: RunDir, outbox: Outbox) -> None:
    """Name the flow run after its run, note its id there, and close flow runs that killed drivers left running."""
    config, left = run.config(), [i for i in run.state().get("flow_runs", []) if i != str(flow_run_id)]
    run.write_state(run.state() | {"flow_runs": [*left, str(flow_run_id)]})
    tags = {*this_flow_run.tags, "dflop", config.name, f"cluster:{config.cluster.name}"}

    async def send() -> None:
        async with get_client() as client:
            await client.update_flow_run(flow_run_id, name=run.run_id, tags=sorted(tags))
            await client.update_flow_run_labels(flow_run_id, {RUN_DIR_LABEL: str(run.path)})
            why = f"its driver was lost; flow run {flow_run_id} has resumed run {run.run_id}"
            await close_flow_runs(client, left, states.Crashed(message=why))
        run.write_state(run.state() | {"flow_runs": [str(flow_run_id)]})

    outbox.put("name", send)


async def _watch(flow_run_id: UUID, run: RunDir, say: Say) -> None:
    """Empty the queue of a flow run that is cancelled; its driver then sees its job cancelled, and ends.

    `dflop serve` and workers listen for their flows, but nobody does for the flow of `dflop run`. A flow whose
    heartbeats found no server may be marked as crashed: it is set right.
    """
    state: State[Any] | None = None
    while state is None or not (state.is_cancelling() or state.is_cancelled()):
        await asyncio.sleep(WATCH_EVERY_S)
        with contextlib.suppress(Exception):  # whatever a client, a proxy or a server comes up with: it is asked again
            # A client of its own: the flow's would try for minutes to reach a server that is gone.
            async with asyncio.timeout(TIMEOUT_S), get_client(httpx_settings={"timeout": TIMEOUT_S}) as client:
                state = (await client.read_flow_run(flow_run_id)).state
                if state is not None and state.is_crashed():
                    alive: State[Any] = states.Running(message="marked as crashed, but its driver is alive")
                    await client.set_flow_run_state(flow_run_id, alive, force=True)
    say("the flow run is cancelled")
    try:
        await asyncio.to_thread(cancel_run, run, say)
    except DflopError as error:
        say(str(error))


def empty_the_queue(flow: Any, flow_run: Any, state: Any) -> None:
    """Cancel what a cancelled flow run has left in the queue; Prefect calls it, by these names of its arguments."""
    if (run := _driven_by(flow_run)) is not None:
        cancel_run(run, print)


def note_crash(flow: Flow[..., Any], flow_run: Any, state: Any) -> None:
    """Say what becomes of the run of a flow that ended without a word; Prefect calls it.

    Prefect ends a flow run with a parameter that its flow does not have before the flow begins: that is a failure.
    """
    valid = flow.parameters.properties
    if unknown := sorted(flow_run.parameters.keys() - valid.keys()):
        hint = did_you_mean(unknown[0], valid)
        error = ConfigError(f"unknown parameter `{unknown[0]}`", where=f"parameters of {flow.name}", hint=hint)
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, states.Failed(message=str(error)), force=True)
        return
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
        return "cancelled by the runtime environment" not in record.getMessage()  # the run says which signal it was


_THREE_LINES = _ThreeLines()


def plain_logs() -> None:
    """Errors of ours are logged as they are; a closed output ends no flow."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_THREE_LINES)
    for name in ("events.clients", "FlowRunSuspendingObserver"):  # of a server that is away an outbox says it once
        logging.getLogger(f"prefect.{name}").setLevel(logging.CRITICAL)
    logging.raiseExceptions = False
    Console.on_broken_pipe = lambda self: None  # type: ignore[method-assign]  # it has no other switch
