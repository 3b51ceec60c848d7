"""What a task of a flow shows in Prefect's UI: lines in its log, one progress bar, tables and texts as artifacts.

Keys of artifacts are the same for every run, so that they stay few on a server. A server that does not answer costs
the picture of a run, not the run: that is said once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import UUID

from prefect import get_run_logger
from prefect.artifacts import (
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)

from dflop.errors import DflopError, redacted
from dflop.run.directory import RunDir
from dflop.run.status import JOB_COLUMNS, job_rows
from dflop.steps.follow import Listener
from dflop.steps.reporting import history_page

MAX_SHOWN_JOBS = 50
EVERY_S = 5.0
"""Least time between two changes of the bar."""
TIMEOUT_S = 15.0
"""Of a request: what waits here delays no run."""

T = TypeVar("T")


class Page(Listener):
    """Hears of a step of a run and shows it; what jobs there are and what was decided is shown when it ends.

    Args:
        step: Name of the task.
        run: The run.
    """

    def __init__(self, step: str, run: RunDir) -> None:
        super().__init__(get_run_logger().info)
        self._key, self._run = f"dflop-{step}-progress", run
        self._bar: UUID | None = None
        self._shown = self._wanted = (-1.0, "")
        self._drawing: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._has_failed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        self._closing.set()
        if error is not None and not isinstance(error, Exception):
            return  # whoever cancels a run does not wait for pictures of it
        if self._drawing is not None:
            await self._drawing
        where = f"logs are in {self._run.path}"
        await self.table("jobs", _jobs, self._run, description=where)
        await self.markdown("history", history_page, self._run, description="event log of the run")

    def progress(self, percent: float, text: str) -> None:
        """Take note of how far the jobs are; the bar follows within seconds."""
        self._wanted = (round(percent, 1), redacted(text))
        if self._drawing is None or self._drawing.done():
            self._drawing = asyncio.get_running_loop().create_task(self._draw(), name="bar")

    async def markdown(self, key: str, text: Callable[..., str], *args: Any, description: str) -> None:
        """Show a text under `dflop-<key>`; it is made in a thread, and what cannot be made is said."""
        if (found := await self._made(text, *args)) is not None:
            await self._sent(acreate_markdown_artifact(redacted(found), f"dflop-{key}", redacted(description)))

    async def table(self, key: str, rows: Callable[..., list[dict[str, Any]]], *args: Any, description: str) -> None:
        """Show rows under `dflop-<key>`; none are no table."""
        if found := await self._made(rows, *args):
            cells = [{k: redacted(v) if isinstance(v, str) else v for k, v in row.items()} for row in found]
            await self._sent(acreate_table_artifact(cells, f"dflop-{key}", redacted(description)))

    async def _draw(self) -> None:
        while self._wanted != self._shown:
            percent, text = self._shown = self._wanted
            if self._bar is None:
                self._bar = await self._sent(acreate_progress_artifact(percent, self._key, text))
            else:
                await self._sent(aupdate_progress_artifact(self._bar, percent, text))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), EVERY_S)

    async def _made(self, make: Callable[..., T], *args: Any) -> T | None:
        try:
            return await asyncio.to_thread(make, *args)
        except DflopError as error:  # what cannot be shown was done all the same
            self.say(f"cannot be shown: {error.what}")
            return None

    async def _sent(self, sending: Awaitable[T]) -> T | None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                found = await sending
        except Exception as error:  # whatever a client, a proxy or a server comes up with
            if not self._has_failed:
                self.say(f"the run's page cannot be updated, the run continues: {type(error).__name__}: {error}")
            self._has_failed = True
            return None
        self._has_failed = False
        return found


def _jobs(run: RunDir) -> list[dict[str, Any]]:
    """The newest jobs of a run, as `dflop runs show` has them."""
    return [dict(zip(JOB_COLUMNS, row, strict=True)) for row in job_rows(run)[-MAX_SHOWN_JOBS:]]
