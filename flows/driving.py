"""How a flow comes by the run it drives, and what becomes of it: the one place where Prefect and `jobs/drive.py` meet.

A flow that is started drives a run; flows inside it find that run here and drive nothing of their own. Errors end a
flow as a state and not as an exception: Prefect would log a traceback above a message that says what to do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast
from uuid import UUID

from hearing import hears_cancel
from keeping import KeepsJobs, outlive_readers, signals_seen
from page import Page
from prefect import State, get_run_logger, states, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.runtime import flow_run as this_flow_run
from prefect.states import Failed

from dflop import errors
from dflop.config import Config, load_config
from dflop.errors import ConfigError, DflopError
from dflop.report.history_table import markdown_history
from dflop.run import lifecycle
from dflop.run.cancel import cancel_run
from dflop.run.directory import RunDir, open_run
from dflop.run.find import find_run
from dflop.run.status import job_table
from dflop.steps.drive import Drive, begin_or_take_up, driving, finished_text
from dflop.views import run_results

MAX_SHOWN_JOBS = 50
RUN_DIR_LABEL = "dflop.run_dir"
"""Label of a flow run with the run directory, by which its jobs are found when it is cancelled."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Driven:
    """The run that this flow drives, and its page."""

    drive: Drive
    page: Page


_DRIVEN: ContextVar[Driven | None] = ContextVar("driven", default=None)


def driven() -> Driven:
    """What the flow drives that this is called in."""
    found = _DRIVEN.get()
    assert found is not None, "called inside a flow that drives a run"
    return found


async def conduct(
    work: Callable[[], Awaitable[None]],
    config: Config | None,
    config_path: str,
    overrides: tuple[str, ...],
    run: str,
) -> str | State[str]:
    """Drive the run that a flow's parameters mean while `work` is done; the path of its directory, or a failed state.

    Args:
        work: Finds the run by `driven`.
        config: Typed configuration.
        config_path: YAML file, read where there is no configuration.
        overrides: `a.b=value` strings for the file.
        run: Existing run, which goes before both.
    """
    outlive_readers()  # to the end of the process: Prefect prints when the flow has ended
    logger, outer = get_run_logger(), _DRIVEN.get()
    try:
        if outer is not None:
            await work()
            return str(outer.drive.run.path)
        meant = await asyncio.to_thread(_run_meant, config, config_path, overrides, run, logger.info)
        if lifecycle.is_finished(meant):
            logger.info(finished_text(meant))
        else:
            async with _driving(meant, logger.info):
                await work()
    except DflopError as error:
        if outer is None:
            logger.error(str(error))
        as_state = states.Cancelled if isinstance(error, errors.Cancelled) else Failed
        return as_state(message=error.what, data=error)
    return str(meant.path)


def page_of_run(name: str) -> tuple[RunDir, Page, Drive | None]:
    """A run to look at, the page for what is seen, and who drives it, if the flow that this is called in does.

    Raises:
        ConfigError: there is no such run.
    """
    if (found := _DRIVEN.get()) is not None:
        return found.drive.run, found.page, found.drive
    return find_run(name, Path("runs")), Page(_flow_run_id(), get_run_logger().info), None


async def step(
    name: str, work: Callable[[Drive], Awaitable[T]], show: Callable[[T], Awaitable[None]] | None = None
) -> T:
    """A part of the run as a task of the flow, and what it leaves to be seen.

    What the cluster did to its jobs it does again by itself, as it does without any Prefect.

    Args:
        name: Of the task.
        work: The part.
        show: Puts its result on the page.

    Raises:
        DflopError: as the part raised it.
    """
    found, results_of_it, failures = driven(), list[T](), list[DflopError]()

    # The store knows what is done, under keys that cover code, hardware and data; Prefect's cache does not. A retry
    # that is never taken keeps Prefect from logging a traceback of nothing above a message that says what to do.
    @task(name=name, tags={"dflop"}, cache_policy=NO_CACHE, retries=1, retry_condition_fn=_never)
    async def part() -> Any:
        # Lines are the task's, and stand on the page of the flow that was started, whichever flow the task is in.
        with found.page.said_by(get_run_logger(flow_run_id=str(found.page.flow_run_id)).info):
            try:
                results_of_it.append(await work(found.drive))
            except DflopError as error:
                failures.append(error)
            rows = await asyncio.to_thread(job_table, found.drive.run, MAX_SHOWN_JOBS)
            await found.page.table("jobs", rows, f"logs are in {found.drive.run.path}")
            if show is not None and not failures:
                try:
                    await show(results_of_it[0])
                except DflopError as error:  # what cannot be shown was done all the same
                    found.page(f"cannot be shown: {error.what}")
        return Failed(message=failures[0].what, data=failures[0]) if failures else None

    # Prefect's types take `return_state` for a synchronous call.
    state: State[Any] = await cast("Awaitable[State[Any]]", part(return_state=True))
    if failures:
        raise failures[0]
    if not results_of_it:  # Prefect itself failed
        await state.aresult()
    return results_of_it[0]


def _never(_task: Any, _task_run: Any, _state: Any) -> bool:
    return False


async def show_history(run: RunDir, page: Page) -> None:
    """What was decided so far."""
    found = await asyncio.to_thread(run_results.load_history, run.config().store, run.run_id)
    await page.markdown("history", markdown_history(found), f"what run {run.run_id} noticed and decided")


def empty_the_queue(flow: Any, flow_run: Any, state: Any) -> None:
    """Cancel what a cancelled flow run has left in the queue; Prefect calls it, by these names of its arguments."""
    labels = flow_run.labels
    if RUN_DIR_LABEL not in labels:  # as the flow run was when it began
        with get_client(sync_client=True) as client:
            labels = client.read_flow_run(flow_run.id).labels
    if RUN_DIR_LABEL in labels:
        cancel_run(open_run(str(labels[RUN_DIR_LABEL])), print)


def flow_run_name() -> str:
    """Name of a flow run by what it was given; the id of its run once it has one."""
    given = this_flow_run.parameters
    if given.get("run"):
        return Path(given["run"]).name
    config = given.get("config")
    if config:
        return str(config.name if isinstance(config, Config) else config.get("name", "?"))
    return Path(given.get("config_path") or "?").stem


def _run_meant(
    config: Config | None, config_path: str, overrides: tuple[str, ...], run: str, say: Callable[[str], None]
) -> RunDir:
    if not (run or config or config_path):
        raise ConfigError(
            "which run? the flow was given no configuration",
            where="parameters",
            hint="fill in `config`, or give a file as `config_path`, or an existing run as `run`",
        )
    if config is not None and config_path and not run:
        say(f"`config` is given, `config_path` ({config_path}) is not read")
    if config is not None and overrides and not run:
        raise ConfigError("`overrides` are for a file", where="parameters", hint="change `config` itself")
    if config is None and not run:
        config = load_config(Path(config_path), overrides)
    return begin_or_take_up(config, Path(config_path or "config"), name=run, say=say)


def _flow_run_id() -> UUID | None:
    context = FlowRunContext.get()
    return context.flow_run.id if context is not None and context.flow_run is not None else None


@contextlib.asynccontextmanager
async def _driving(run: RunDir, say: Callable[[str], None]) -> AsyncIterator[None]:
    page = Page(_flow_run_id(), say)
    with signals_seen() as was_told:
        async with driving(run, page, show_history=lambda: show_history(run, page)) as drive:
            drive.launcher = KeepsJobs.around(drive.launcher, was_told, page)
            async with _on_page(drive, page), hears_cancel(page.flow_run_id, run, page):
                yield


@contextlib.asynccontextmanager
async def _on_page(drive: Drive, page: Page) -> AsyncIterator[None]:
    """The run that is driven is known to flows inside, and its page is left as it stands in the end."""
    config, run = drive.config, drive.run
    tags = {*this_flow_run.tags, "dflop", config.name, f"cluster:{config.cluster.name}"}
    await page.introduce(run.run_id, tags, {RUN_DIR_LABEL: str(run.path)})
    token = _DRIVEN.set(Driven(drive, page))
    try:
        yield
    except asyncio.CancelledError:
        await page.cancelled()
        raise
    except Exception:
        await page.close()
        raise
    finally:
        _DRIVEN.reset(token)
    await page.close()
