"""What is done beside a training job, round after round: rows come home, decisions are told, and new ones are made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from dflop.errors import Interrupted, LaunchError
from dflop.launch import JobHandle, Launcher
from dflop.records import Decision
from dflop.run.console import Say
from dflop.run.directory import RunDir
from dflop.steps import replanning, reprofile, submit
from dflop.steps.follow import follow_job, ingest_run
from dflop.steps.replanning import Advice
from dflop.steps.reprofile import Reprofile
from dflop.store.reader import Reader


class Teller:
    """Says what is decided while this process drives a run, each decision once, as soon as it is in the store.

    Args:
        run: The run.
        say: Told a line for each.
        show: Called when there are new ones.
    """

    def __init__(self, run: RunDir, say: Say, show: Callable[[], Awaitable[None]]) -> None:
        self._run, self._store, self._say, self._show = run, run.config().store, say, show
        self._began_at_s = time.time()
        self._told: set[tuple[float, str, str]] = set()

    async def tell(self) -> None:
        """Ingests, and says what is new."""
        await ingest_run(self._run, lambda _: None)
        # Not decisions themselves: their numbers may be NaN, which equals nothing.
        found = {(d.observed_at_s, d.kind, d.subject): d for d in await asyncio.to_thread(self._decisions)}
        new = [decision for key, decision in found.items() if key not in self._told]
        self._told.update(found)
        for decision in new:
            kind = decision.kind.replace("_", " ")
            self._say(f"step {decision.step + 1}: {kind}, {decision.subject}: {decision.verdict}: {decision.detail}")
        if new:
            await self._show()

    def _decisions(self) -> Sequence[Decision]:
        with Reader(self._store) as reader:
            return [d for d in reader.decisions(self._run.run_id) if d.observed_at_s >= self._began_at_s]


class Rounds:
    """The rounds beside one job.

    Args:
        run: The run.
        launcher: Of the run.
        say: Told what happens.
        teller: Says decisions.
    """

    def __init__(self, run: RunDir, launcher: Launcher, say: Say, teller: Teller) -> None:
        self._run, self._launcher, self._say, self._teller = run, launcher, say, teller
        self._config = run.config()
        self.advice: Advice | None = None
        """What the job was told to stop for."""
        self._probing: asyncio.Task[None] | None = None

    async def round(self, handle: JobHandle) -> None:
        """One round; a job that is to stop is told so again in each."""
        await self._teller.tell()
        if not self._run.is_replanning():
            advice = await asyncio.to_thread(replanning.consider, self._run, self._config, self._say)
            if advice is not None and advice.is_to_act and self._config.replan.mode == "act":
                self.advice = advice
                self._run.mark_replanning(True)
        if self._run.is_replanning():
            await asyncio.to_thread(self._launcher.interrupt, handle)
        else:
            await self._probe()

    async def close(self) -> None:
        """Ends what still goes on beside the job."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)

    async def _probe(self) -> None:
        """Has doubtful sizes timed again, once there are some, where there is a place for it."""
        is_busy = self._probing is not None and not self._probing.done()
        if is_busy or not submit.has_place_beside(self._config, self._run.plan()):
            return
        work = await asyncio.to_thread(reprofile.doubtful, self._run, self._config)
        if work is not None:
            self._probing = asyncio.create_task(self._reprofile(work), name="reprofile")

    async def _reprofile(self, work: Reprofile) -> None:
        for spec in submit.reprofile_jobs(self._run, self._config, work):
            try:
                await follow_job(self._run, self._launcher, spec, self._say)
            except (LaunchError, Interrupted) as error:
                self._say(f"{spec.name}: {error.what}")  # that it measured nothing is judged below
        await asyncio.to_thread(reprofile.settle, self._run, self._config, work, self._say)
