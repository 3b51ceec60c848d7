"""What every step of a run does around its own work: follow a job, bring its rows home, note a finished profile."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from dflop.config import Config
from dflop.errors import Cancelled
from dflop.launch import (
    Change,
    JobHandle,
    JobSpec,
    JobState,
    JobStatus,
    Journal,
    Launcher,
    run_job_async,
    run_jobs_async,
)
from dflop.records import ProfileRecord
from dflop.run import lifecycle
from dflop.run.console import Say
from dflop.run.directory import RunDir
from dflop.steps.watching import JobTalk
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.spool import SpoolWriter
from dflop.units import count, seconds

__all__ = [
    "LOCAL_POLL_S",
    "Meanwhile",
    "follow_job",
    "follow_jobs",
    "ingest_run",
    "note_profile",
    "refuse_if_cancelled",
    "stored_profile",
]

LOCAL_POLL_S = 0.5
MAX_SAID = 8
"""Jobs of which the same is said one by one; of more it is said once."""

Meanwhile = Callable[[JobHandle], Awaitable[None]]
"""A round of what is done beside the waiting for a job."""


def poll_interval_s(config: Config) -> float:
    """Seconds after which the end of a job is noticed at the latest."""
    return config.cluster.slurm.poll_interval_s if config.cluster.backend == "slurm" else LOCAL_POLL_S


async def follow_job(
    run: RunDir, launcher: Launcher, spec: JobSpec, say: Say, *, meanwhile: Meanwhile | None = None, every_s: float = 60
) -> list[Any]:
    """Submits or adopts a job and follows it to its end; its state and log lines are said.

    Args:
        run: That the job belongs to.
        launcher: Of the run.
        spec: The job.
        say: Told what happens; how the job stands, too, if it is one of `ShowsJobs`.
        meanwhile: Done again and again from the job's first sign of life to its end; an error in it is said and is
            none of the job. A round that the job's end finds at work is waited for.
        every_s: Pause between two rounds.

    Returns:
        Results of its tasks.

    Raises:
        Cancelled: the run was, by `dflop cancel`; nothing is submitted then.
        Interrupted: the job was told to stop.
        LaunchError: it was refused, or did not end well.
    """
    refuse_if_cancelled(run)
    name = _name_of(run, spec)
    talk = JobTalk(name, say)
    beside: list[asyncio.Task[None]] = []
    has_ended = asyncio.Event()

    def on_state(handle: JobHandle, status: JobStatus) -> None:
        talk.state(handle, status)
        if meanwhile is not None and not beside and not status.state.is_final:
            rounds = _repeat(functools.partial(meanwhile, handle), every_s, has_ended, say)
            beside.append(asyncio.create_task(rounds, name=f"beside {name}"))

    try:
        return await run_job_async(
            launcher,
            spec,
            Journal(run.path, run.run_id),
            on_state=on_state,
            on_log_line=talk.line,
            poll_interval_s=_look_every_s(run),
        )
    except asyncio.CancelledError:
        for task in beside:
            task.cancel()
        raise
    finally:
        has_ended.set()
        await asyncio.gather(*beside, return_exceptions=True)


async def follow_jobs(run: RunDir, launcher: Launcher, specs: Sequence[JobSpec], say: Say) -> list[list[Any]]:
    """Submits jobs together, on Slurm as an array, and follows them to their ends.

    Those that live are adopted, those that ended well before are kept, and only the others are submitted.

    Args:
        run: That the jobs belong to.
        launcher: Of the run.
        specs: The jobs; each does the same whenever it is done.
        say: Told what happens; how the jobs stand, too, if it is one of `ShowsJobs`.

    Returns:
        Results of the tasks of each.

    Raises:
        Cancelled: the run was, by `dflop cancel`; nothing is submitted then.
        Interrupted: a job was told to stop.
        LaunchError: a job was refused, or did not end well; raised when all have ended.
    """
    refuse_if_cancelled(run)
    talks = {spec.key: JobTalk(_name_of(run, spec), say) for spec in specs}

    def on_changes(changes: Sequence[Change]) -> None:
        for gist, alike in groupby(sorted(changes, key=_gist), _gist):
            jobs = list(alike)
            is_many = len(jobs) > MAX_SAID
            if is_many:
                say(f"{len(jobs)} jobs, from {jobs[0][0]} to {jobs[-1][0]}, are {JobStatus(*gist)}")
            for handle, status in jobs:
                talks[handle.key].state(handle, status, is_said=not is_many)

    return await run_jobs_async(
        launcher,
        specs,
        Journal(run.path, run.run_id),
        keep_done=True,
        on_changes=on_changes,
        on_log_line=lambda handle, line: talks[handle.key].line(line),
        poll_interval_s=_look_every_s(run),
    )


def _gist(change: Change) -> tuple[JobState, str]:
    return change[1].gist


def _name_of(run: RunDir, spec: JobSpec) -> str:
    """Within the run."""
    return spec.name.removeprefix(f"{run.run_id}-")


def _look_every_s(run: RunDir) -> float:
    """Between two looks; the Slurm backend asks Slurm less often."""
    cluster = run.config().cluster
    return min(cluster.slurm.poll_interval_s, 5.0) if cluster.backend == "slurm" else LOCAL_POLL_S


def refuse_if_cancelled(run: RunDir) -> None:
    """Stop a driver whose run was cancelled by somebody else.

    Raises:
        Cancelled: it was.
    """
    if run.is_cancelled():
        raise Cancelled(
            f"run `{run.run_id}` was cancelled",
            where=str(run.path),
            hint="dflop run, or dflop train, takes it up again",
        )


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
                say("beside the job: works again")
            told = ""
        except Exception as error:
            # The job is worth more than what is done beside it.
            if (gist := _without_numbers(error)) != told:
                told = gist
                say(f"beside the job: {type(error).__name__}: {error}; tried again every {seconds(every_s)}")


def _without_numbers(error: Exception) -> str:
    """What it says, but for words that are others each time: names of temporary files, sizes, times."""
    return re.sub(r"\S*\d\S*", "", f"{type(error).__name__} {error}")


async def ingest_run(run: RunDir, say: Say) -> None:
    """Brings what jobs spooled, and the job journal so far, into the database."""
    config = run.config()
    lifecycle.spool_journal(run, config)
    report = await asyncio.to_thread(ingest, config.store)
    say(f"ingested {count(report.num_rows)} rows of {report.num_files} files in {seconds(report.elapsed_s)}")


def stored_profile(store: Path, key: str) -> ProfileRecord | None:
    """The finished profile of this key; None also for a store that has never been written."""
    ingest(store)
    with Reader(store) as reader:
        return reader.profile(key)


def note_profile(
    run: RunDir,
    key: str,
    kind: str,
    counts: Sequence[Mapping[str, Any]],
    elapsed_s: float,
    inputs: Mapping[str, object],
) -> ProfileRecord:
    """Spools the record that says a profile is complete.

    Args:
        run: Run that made it.
        key: Its identity.
        kind: `data` or `model`.
        counts: What its jobs counted.
        elapsed_s: Time it took, waiting included.
        inputs: What the key was computed from, for people.
    """
    record = ProfileRecord(
        profile_key=key,
        kind=kind,
        run_id=run.run_id,
        inputs=json.dumps(inputs),
        num_rows=sum(int(c.get("num_samples", c.get("num_measurements", 0))) for c in counts),
        num_quarantined=sum(int(c.get("num_quarantined", 0)) for c in counts),
        created_at_s=time.time(),
        elapsed_s=elapsed_s,
    )
    with SpoolWriter(run.config().store, run.run_id, "profile-record") as spool:
        spool.append(record)
    return record
