"""What the page of a flow run shows: artifacts, all of them on the run that somebody started, none on inner ones.

Keys are few and the same for every run, so that a server does not collect a key per job for ever; the run they belong
to is the flow run's. A server that does not answer costs the picture of a run, not the run: that is said once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

from prefect.artifacts import MarkdownArtifact, TableArtifact
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

from dflop.errors import redacted
from dflop.launch import JobState, JobStatus
from dflop.run.console import Say
from dflop.steps.watching import JobProgress

MAX_BARS = 16
"""Jobs of one kind that have a bar each; those beyond share one."""
MAX_KINDS = 16
EVERY_S = 5.0
"""Least time between two changes of bars."""
TIMEOUT_S = 15.0
"""Of a request: what waits here, waits beside the run."""
FAREWELL_S = 5.0
"""For the last change of a run that is cancelled: whoever cancels it does not wait for long."""
_NUMBERED = re.compile(r"(.+?)-(\d+)$")


class Page:
    """Artifacts of one flow run.

    Called with a line, it says it; told how a job stands, it keeps that job's bar.

    Args:
        flow_run_id: The flow run whose page it is; None: there is no page, lines are said all the same.
        say: Told lines.
        every_s: Least time between two changes of bars.
    """

    def __init__(self, flow_run_id: UUID | None, say: Say, *, every_s: float = EVERY_S) -> None:
        self._id, self._say, self._every_s = flow_run_id, say, every_s
        self._has_failed = False
        self._artifacts: dict[str, UUID] = {}
        self._jobs: dict[str, dict[str, JobProgress]] = {}
        self._changed: set[str] = set()
        self._drawing: asyncio.Task[None] | None = None
        self._must_stop = asyncio.Event()

    @property
    def flow_run_id(self) -> UUID | None:
        """The flow run whose page it is."""
        return self._id

    def __call__(self, line: str) -> None:
        """Say a line."""
        self._say(line)

    def job(self, progress: JobProgress) -> None:
        """Take note of how a job stands; its bar follows within seconds."""
        key = bar_key(progress.name)
        if key not in self._jobs and len(self._jobs) >= MAX_KINDS * MAX_BARS:
            key = "dflop-job-others"
        self._jobs.setdefault(key, {})[progress.name] = progress
        self._changed.add(key)
        if self._drawing is None or self._drawing.done():
            self._drawing = asyncio.get_running_loop().create_task(self._draw(), name="bars")

    @contextlib.contextmanager
    def said_by(self, say: Say) -> Iterator[None]:
        """Lines of this block belong to somebody else: a task."""
        before, self._say = self._say, say
        try:
            yield
        finally:
            self._say = before

    async def introduce(self, name: str, tags: Iterable[str], labels: Mapping[str, str]) -> None:
        """Name the flow run, and note on it what it is about."""
        async with self._server() as client:
            if client is not None and self._id is not None:
                await client.update_flow_run(self._id, name=name, tags=sorted(tags))
                await client.update_flow_run_labels(self._id, dict(labels))

    async def markdown(self, key: str, text: str, description: str = "", *, keeps_old: bool = False) -> None:
        """Show a text under `dflop-<key>`.

        Args:
            key: What it is of.
            text: Markdown.
            description: A line above it and in lists.
            keeps_old: Whether what was shown before stays, beside it; else the text takes its place.
        """
        found = await MarkdownArtifact(markdown=text).aformat()
        await self._put(f"dflop-{key}", "markdown", found, description, keeps_old=keeps_old)

    async def table(self, key: str, rows: Sequence[dict[str, Any]], description: str = "") -> None:
        """Show rows under `dflop-<key>`, in place of those shown before; none are no table."""
        if rows:
            found = await TableArtifact(table=list(rows)).aformat()
            await self._put(f"dflop-{key}", "table", found, description)

    async def close(self) -> None:
        """Show what was told last."""
        await self._stop_drawing()
        await self._show_bars()

    async def cancelled(self) -> None:
        """Show that jobs which had not ended were cancelled with the flow run."""
        for key, jobs in self._jobs.items():
            for name, job in jobs.items():
                if not job.status.state.is_final:
                    status = JobStatus(JobState.CANCELLED, "with its flow run")
                    jobs[name] = dataclasses.replace(job, status=status)
                    self._changed.add(key)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await self._stop_drawing()
                await self._show_bars()

    async def _stop_drawing(self) -> None:
        """Let it end with the request it is at: the server may have made a bar whose id would be lost."""
        if self._drawing is not None:
            self._must_stop.set()
            await asyncio.gather(self._drawing, return_exceptions=True)
            self._must_stop.clear()

    async def _draw(self) -> None:
        while self._changed and not self._must_stop.is_set():
            await self._show_bar()
            if not self._changed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._must_stop.wait(), self._every_s)

    async def _show_bars(self) -> None:
        while self._changed:
            await self._show_bar()

    async def _show_bar(self) -> None:
        key = self._changed.pop()
        jobs = list(self._jobs[key].values())
        percent = 100.0 * sum(job.done_frac for job in jobs) / len(jobs)
        try:
            await self._put(key, "progress", round(percent, 1), bar_text(jobs))
        except asyncio.CancelledError:
            self._changed.add(key)  # by a loop that ends; whoever says farewell draws the last picture
            raise

    async def _put(self, key: str, kind: str, data: Any, text: str, *, keeps_old: bool = False) -> None:
        text, data = redacted(text), redacted(data) if isinstance(data, str) else data
        async with self._server() as client:
            if client is None:
                return
            if key in self._artifacts and not keeps_old:
                await client.update_artifact(self._artifacts[key], ArtifactUpdate(data=data, description=text))
            else:
                wanted = ArtifactCreate(key=key, type=kind, data=data, description=text, flow_run_id=self._id)
                self._artifacts[key] = (await client.create_artifact(wanted)).id

    @contextlib.asynccontextmanager
    async def _server(self) -> AsyncIterator[PrefectClient | None]:
        """A client for one change; None without a page. What goes wrong with it is said, once."""
        if self._id is None:
            yield None
            return
        try:
            # A client of its own: the flow's would try for minutes to reach a server that is gone.
            async with asyncio.timeout(TIMEOUT_S), get_client(httpx_settings={"timeout": TIMEOUT_S}) as client:
                yield client
            self._has_failed = False
        except Exception as error:  # whatever a client, a proxy or a server comes up with
            if not self._has_failed:
                self._say(f"the run's page cannot be kept up to date, the run goes on: {type(error).__name__}: {error}")
            self._has_failed = True


def bar_key(name: str) -> str:
    """Key of the bar that a job belongs to: jobs that are numbered share one beyond the first `MAX_BARS`.

    Jobs that come again and again (`reprofile-3-tp1`) are one.
    """
    kind = "reprofile" if name.startswith("reprofile") else name
    found = _NUMBERED.match(kind)
    if found is not None and int(found[2]) >= MAX_BARS:
        kind = f"{found[1]}-others"
    return "dflop-job-" + re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")


def bar_text(jobs: Sequence[JobProgress]) -> str:
    """What stands beside a bar: how its job stands, or how many of its jobs stand how."""
    if len(jobs) == 1:
        job = jobs[0]
        return f"{job} ({job.name}, {job.handle.backend} {job.handle.job_id})"  # lists show its first words
    states = [str(job.status.state) for job in jobs]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
