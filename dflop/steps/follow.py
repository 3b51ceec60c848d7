"""Follows jobs from submission to end: what a step does around its own work, whoever listens.

A flow listens with a page in Prefect's UI, `dflop train` with a terminal: both are a `Listener`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dflop.config import Config
from dflop.errors import InfrastructureError, Interrupted
from dflop.launch import Change, JobHandle, JobSpec, JobState, JobStatus, Journal, Launcher, log_paths, run_jobs_async
from dflop.records import Decision
from dflop.run import lifecycle
from dflop.run.directory import RunDir
from dflop.run.driver_lock import refuse_if_taken_over
from dflop.run.messages import PROGRESS_LINE, Meter, Say
from dflop.run.queue import as_cancelled
from dflop.run.status import STEP_LINE
from dflop.store.ingest import ingest
from dflop.units import count, seconds

LOCAL_POLL_S = 0.5
MAX_SAID = 8
"""Jobs of which the same is said one by one; of more it is said once."""
MAX_LINES, PER_S = 120, 60.0
"""Most lines of jobs' logs in a run's own log: a log page keeps every line, and its server is shared."""

Meanwhile = Callable[[JobHandle], Awaitable[None]]
"""A round of what is done while a job runs."""


class Listener:
    """Receives what happens in a step; `say` receives lines."""

    def __init__(self, say: Say) -> None:
        self.say, self._meter = say, Meter(say)

    def progress(self, percent: float, text: str) -> None:
        """Receives how far the followed jobs are; called from the event loop, often, and returns at once."""
        if self._meter.is_drawn and percent < 100:  # a log has the jobs' own lines
            self._meter("percent of the jobs' work", int(percent), 100)

    def decided(self, decision: Decision) -> None:
        """Receives what the run noticed or decided; returns at once."""


def poll_interval_s(config: Config) -> float:
    """Seconds after which the end of a job is noticed at the latest."""
    return config.cluster.slurm.poll_interval_s if config.cluster.backend == "slurm" else LOCAL_POLL_S


async def follow_jobs(
    run: RunDir,
    launcher: Launcher,
    specs: Sequence[JobSpec],
    to: Listener,
    *,
    keep_done: bool = True,
    meanwhile: Meanwhile | None = None,
    every_s: float = 60.0,
) -> list[list[Any]]:
    """Results of the tasks of jobs that are submitted together, on Slurm as an array, and followed to their ends.

    Those that live are adopted, those that ended well before are kept (not with `keep_done=False`, for work that goes
    on under the same key). `meanwhile` is done every `every_s` from the first job's first sign of life to its end; an
    error in it is said and is none of the job, and a round that the job's end finds at work is waited for.

    Raises:
        Cancelled: the run was, by `dflop cancel`; nothing is submitted then.
        Interrupted: a job stopped on request.
        LaunchError: somebody else drives the run; or a job was refused, or did not end well, raised when all have
            ended.
    """
    refuse_if_cancelled(run)
    announcer = _Announcer(run, specs, to)
    rounds: list[asyncio.Task[None]] = []
    has_ended = asyncio.Event()

    def on_changes(changes: Sequence[Change]) -> None:
        announcer.changes(changes)
        handle, status = changes[0]
        if meanwhile is not None and not rounds and not status.state.is_final:
            work = _repeat(functools.partial(meanwhile, handle), every_s, has_ended, to.say)
            rounds.append(asyncio.create_task(work, name=f"rounds of {handle.name}"))

    look_every_s = min(poll_interval_s(run.config()), 5.0)  # the Slurm backend asks Slurm less often
    try:
        return await run_jobs_async(
            launcher, specs, Journal(run.path, run.run_id), keep_done=keep_done, on_changes=on_changes,
            on_log_line=announcer.line, poll_interval_s=look_every_s,
        )  # fmt: skip
    except asyncio.CancelledError:
        for task in rounds:
            task.cancel()
        raise
    finally:
        has_ended.set()
        await asyncio.gather(*rounds, return_exceptions=True)


def refuse_if_cancelled(run: RunDir) -> None:
    """Stop a driver whose run was cancelled (Cancelled) or taken over (LaunchError) by somebody else."""
    if run.is_cancelled():
        raise as_cancelled(run)
    refuse_if_taken_over(run)


def is_infrastructure_failure(error: object, run: RunDir) -> bool:
    """Whether the cluster, and not the job, caused an error, so that the step is worth running again.

    Slurm interrupts jobs for a time limit or for somebody else's job; on this machine an interrupt is meant.
    """
    was_interrupted = isinstance(error, Interrupted) and run.config().cluster.backend == "slurm"
    return was_interrupted or isinstance(error, InfrastructureError)


class _Announcer:
    """Reports states, steps and log lines of the jobs that are followed together."""

    def __init__(
        self, run: RunDir, specs: Sequence[JobSpec], to: Listener, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._names = {spec.key: spec.name.removeprefix(f"{run.run_id}-") for spec in specs}
        self._to, self._clock = to, clock
        self._jobs: dict[str, Change] = {}
        """By key, how the newest job stands."""
        self._done: dict[str, tuple[int, int, str]] = {}
        """By job id, how much is done, of how much, and the words for it: steps, or what a job's `Meter` counts."""
        self._since_s, self._num_lines, self._num_hidden = float("-inf"), 0, 0

    def changes(self, changes: Sequence[Change]) -> None:
        """States, or what is said of them, have changed."""
        alike: dict[JobStatus, list[JobHandle]] = {}
        for handle, status in sorted(changes, key=lambda change: change[1].gist):
            alike.setdefault(JobStatus(*status.gist), []).append(handle)
        for status, jobs in alike.items():
            if len(jobs) > MAX_SAID:
                self._to.say(f"{len(jobs)} jobs, from {jobs[0]} to {jobs[-1]}, are {status}")
            else:
                for handle in jobs:
                    self._to.say(f"{handle} is {status}")
        for handle, status in changes:
            self._jobs[handle.key] = handle, status
            if status.state.is_final:
                self._admit_hidden(handle)
        self._show()

    def line(self, handle: JobHandle, line: str) -> None:
        """A line of a job's log."""
        found = STEP_LINE.match(line) or PROGRESS_LINE.match(line)
        if self._clock() - self._since_s >= PER_S:
            self._admit_hidden(handle)
            self._since_s, self._num_lines = self._clock(), 0
        self._num_lines += 1
        if self._num_lines > MAX_LINES:
            self._num_hidden += 1
        else:
            self._to.say(f"{self._names[handle.key]} | {line}")
        if handle.key in self._jobs and found is not None:
            unit = " steps" * (found.re is STEP_LINE)
            self._done[handle.job_id] = int(found[1]), int(found[2]), f"{found[1]} of {found[2]}{unit} done"
            self._show()

    def _admit_hidden(self, handle: JobHandle) -> None:
        if self._num_hidden:
            log = log_paths(handle).stderr
            self._to.say(f"{self._names[handle.key]} | [{self._num_hidden} lines not shown; see {log}]")
        self._num_hidden = 0

    def _show(self) -> None:
        jobs = list(self._jobs.values())
        done = [(1, 1, "") if s.state is JobState.DONE else self._done.get(h.job_id, (0, 1, "")) for h, s in jobs]
        percent = 100.0 * sum(part / whole for part, whole, _ in done) / len(self._names)
        if len(self._names) == 1:
            handle, status = jobs[0]
            parts = (status.state, self._done.get(handle.job_id, (0, 1, ""))[2], status.reason.split("\n")[0])
            text = f"{', '.join(filter(None, parts))} ({handle.backend} {handle.job_id})"
        else:
            states = [str(status.state) for _, status in jobs]
            text = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        self._to.progress(percent, text)


async def _repeat(work: Callable[[], Awaitable[None]], every_s: float, has_ended: asyncio.Event, say: Say) -> None:
    told = ""
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(has_ended.wait(), every_s)
        if has_ended.is_set():
            return
        try:
            await work()
            if told:
                say("side task of the job works again")
            told = ""
        except Exception as error:
            # The job is worth more than what is done beside it. Said once, whatever names, sizes and times are in it.
            if (gist := re.sub(r"\S*\d\S*", "", f"{type(error).__name__} {error}")) != told:
                told = gist
                say(f"side task of the job failed: {type(error).__name__}: {error}; retrying every {seconds(every_s)}")


async def ingest_run(run: RunDir, say: Say, *, is_urgent: bool = True) -> None:
    """Brings what jobs spooled, and the job journal so far, into the database."""
    config = run.config()
    lifecycle.spool_journal(run, config)
    report = await asyncio.to_thread(ingest, config.store, is_urgent=is_urgent)
    say(f"ingested {count(report.num_rows)} rows of {report.num_files} files in {seconds(report.elapsed_s)}")
