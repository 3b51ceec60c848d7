"""What a task of a flow shows in Prefect's UI: lines in its log, one progress bar, tables and texts as artifacts.

Keys of artifacts are the same for every run, so that they stay few on a server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Self, TypeVar
from uuid import UUID

from outbox import OUTBOX
from prefect import get_run_logger
from prefect.artifacts import (
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)
from prefect.events import emit_event

from dflop.errors import DflopError, redacted
from dflop.records import Decision
from dflop.run.directory import RunDir
from dflop.run.status import JOB_COLUMNS, job_rows
from dflop.steps.follow import Listener
from dflop.steps.reporting import history_page

MAX_SHOWN_JOBS = 50
EVERY_S = 5.0
"""Least time between two changes of the bar."""

T = TypeVar("T")


class Page(Listener):
    """Hears of a step of a run and shows it; what jobs there are and what was decided is shown when it ends."""

    def __init__(self, step: str, run: RunDir) -> None:
        super().__init__(get_run_logger().info)
        self._key, self._run = f"dflop-{step}-progress", run
        self._bar: UUID | None = None
        self._wanted, self._drawn_s = (-1.0, ""), float("-inf")
        self._drawing: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._drawing is not None:
            self._drawing.cancel()
            self._draw()
        if error is not None and not isinstance(error, Exception):
            return  # whoever cancels a run does not wait for pictures of it
        where = f"logs are in {self._run.path}"
        await self.table("jobs", _jobs, self._run, description=where)
        await self.markdown("history", history_page, self._run, description="event log of the run")

    def progress(self, percent: float, text: str) -> None:
        """Take note of how far the jobs are; the bar follows within seconds."""
        if (wanted := (round(percent, 1), redacted(text))) == self._wanted:
            return
        self._wanted = wanted
        if self._drawing is None:
            wait_s = max(0.0, self._drawn_s + EVERY_S - time.monotonic())
            self._drawing = asyncio.get_running_loop().call_later(wait_s, self._draw)

    def decided(self, decision: Decision) -> None:
        """Emit an event, as `dflop.replan.advised`, which automations may wait for."""
        run_id, payload = self._run.run_id, {"step": decision.step, "detail": redacted(decision.detail)}
        resource = {"prefect.resource.id": f"dflop.run.{run_id}", "prefect.resource.name": run_id}
        emit_event(f"dflop.{decision.kind}.{decision.verdict}", resource, payload=payload)

    async def markdown(self, key: str, text: Callable[..., str], *args: Any, description: str) -> None:
        """Show a text under `dflop-<key>`; it is made in a thread, and what cannot be made is said."""
        if (found := await self._made(text, *args)) is not None:
            self._show(f"dflop-{key}", partial(acreate_markdown_artifact, redacted(found)), description)

    async def table(self, key: str, rows: Callable[..., list[dict[str, Any]]], *args: Any, description: str) -> None:
        """Show rows under `dflop-<key>`; none are no table."""
        if found := await self._made(rows, *args):
            cells = [{k: redacted(v) if isinstance(v, str) else v for k, v in row.items()} for row in found]
            self._show(f"dflop-{key}", partial(acreate_table_artifact, cells), description)

    def _show(self, key: str, create: Callable[..., Any], description: str) -> None:
        OUTBOX.get().put(key, partial(create, key=key, description=redacted(description)))

    def _draw(self) -> None:
        self._drawing, self._drawn_s = None, time.monotonic()
        OUTBOX.get().put(self._key, self._send_bar)

    async def _send_bar(self) -> None:
        percent, text = self._wanted
        if self._bar is None:
            self._bar = await acreate_progress_artifact(percent, self._key, text)
        else:
            await aupdate_progress_artifact(self._bar, percent, text)

    async def _made(self, make: Callable[..., T], *args: Any) -> T | None:
        try:
            return await asyncio.to_thread(make, *args)
        except DflopError as error:  # what cannot be shown was done all the same
            self.say(f"cannot be shown: {error.what}")
            return None


def _jobs(run: RunDir) -> list[dict[str, Any]]:
    """The newest jobs of a run, as `dflop runs show` has them."""
    return [dict(zip(JOB_COLUMNS, row, strict=True)) for row in job_rows(run)[-MAX_SHOWN_JOBS:]]
