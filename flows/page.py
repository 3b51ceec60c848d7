"""What a flow run shows in Prefect's UI: lines in its log, one progress bar, tables and texts as artifacts.

Keys of artifacts are the same for every run, so that they stay few on a server. What is to be shown goes through an
outbox, for which the run never waits: a server that is away costs the page.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any, Self, TypeVar
from uuid import UUID

import httpx
from prefect import artifacts, get_run_logger
from prefect.events import emit_event

from dflop.errors import Cancelled, DflopError, redacted
from dflop.records import Decision
from dflop.run.directory import RunDir
from dflop.run.messages import Say
from dflop.run.status import JOB_COLUMNS, job_rows
from dflop.steps.follow import Listener
from dflop.steps.reporting import history_page
from dflop.units import seconds

MAX_SHOWN_JOBS = 50
EVERY_S = 5.0
"""Least time between two changes of the bar."""
TIMEOUT_S = 15.0
"""Timeout of a request: a server that accepts and does not answer is away."""
RETRY_S = 5.0
END_S, SHORT_END_S = 60.0, 5.0
"""How long the end of a flow waits for a server that is away; the short one where somebody has stopped it."""
_RETRIED = (401, 403, 408, 429)
"""4xx answers that a retry may not get."""

Send = Callable[[], Coroutine[Any, Any, Any]]
T = TypeVar("T")


class Outbox:
    """Sends in order, one after the other and in the background, and again until the server has answered.

    For the length of a block, in which it is `OUTBOX`; the end of the block waits for what is not sent yet. `say` hears
    that the server does not respond, that it does again, and at the end what its page lacks.
    """

    def __init__(self, say: Say) -> None:
        self._say = say
        self._waiting: dict[str, tuple[Context, Send]] = {}
        self._sender: asyncio.Task[None] | None = None
        self.is_away = False
        """Whether the last request had no answer."""

    def put(self, name: str, send: Send) -> None:
        """Send this, in the context of the caller, in place of what waits under the same name."""
        self._waiting[name] = copy_context(), send
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send(), name="outbox")

    async def __aenter__(self) -> Self:
        OUTBOX.set(self)
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        is_stopped = isinstance(error, Cancelled) or not isinstance(error, Exception | None)
        if self._sender is not None:
            await asyncio.wait({self._sender}, timeout=SHORT_END_S if is_stopped else END_S)
            self._sender.cancel()
        if self._waiting:
            self._say(f"the Prefect server did not respond until the end; its page lacks {', '.join(self._waiting)}")

    async def _send(self) -> None:
        while self._waiting:
            name, (context, send) = next(iter(self._waiting.items()))
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await asyncio.get_running_loop().create_task(send(), context=context)
            except Exception as error:  # whatever a client, a proxy or a server comes up with
                if _is_away(error):
                    if not self.is_away:
                        what = f"{type(error).__name__}: {error}".rstrip(": ")
                        self._say(f"the Prefect server does not respond, the run continues without it: {what}")
                    self.is_away = True
                    await asyncio.sleep(RETRY_S)
                    continue
                self._say(f"cannot be shown: {name}: {type(error).__name__}: {error}")
            else:
                if self.is_away:
                    self._say("the Prefect server responds again")
                self.is_away = False
            if self._waiting[name][1] is send:
                del self._waiting[name]


def _is_away(error: Exception) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500 or error.response.status_code in _RETRIED
    return isinstance(error, httpx.TransportError | OSError)


OUTBOX: ContextVar[Outbox] = ContextVar("outbox")
"""Outbox of the flow run in whose context this is."""


class Page(Listener):
    """Shows a step of a run as it goes; its jobs and decisions when it ends."""

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
            self._show(f"dflop-{key}", partial(artifacts.acreate_markdown_artifact, redacted(found)), description)

    async def table(self, key: str, rows: Callable[..., list[dict[str, Any]]], *args: Any, description: str) -> None:
        """Show rows under `dflop-<key>`; none are no table."""
        if found := await self._made(rows, *args):
            cells = [{k: redacted(v) if isinstance(v, str) else v for k, v in row.items()} for row in found]
            self._show(f"dflop-{key}", partial(artifacts.acreate_table_artifact, cells), description)

    def _show(self, key: str, create: Callable[..., Any], description: str) -> None:
        OUTBOX.get().put(key, partial(create, key=key, description=redacted(description)))

    def _draw(self) -> None:
        self._drawing, self._drawn_s = None, time.monotonic()
        OUTBOX.get().put(self._key, self._send_bar)

    async def _send_bar(self) -> None:
        percent, text = self._wanted
        if self._bar is None:
            self._bar = await artifacts.acreate_progress_artifact(percent, self._key, text)
        else:
            await artifacts.aupdate_progress_artifact(self._bar, percent, text)

    async def _made(self, make: Callable[..., T], *args: Any) -> T | None:
        try:
            return await asyncio.to_thread(make, *args)
        except DflopError as error:  # what cannot be shown was done all the same
            self.say(f"cannot be shown: {error.what}")
            return None


def _jobs(run: RunDir) -> list[dict[str, Any]]:
    """The newest jobs of a run, as `dflop runs show` has them."""
    rows = [dict(zip(JOB_COLUMNS, row, strict=True)) for row in job_rows(run)[-MAX_SHOWN_JOBS:]]
    return [{**row, "took_s": "" if row["took_s"] is None else seconds(row["took_s"])} for row in rows]
