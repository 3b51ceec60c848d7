"""Waits for jobs without owning them: adopts what lives, submits what does not, cancels only when told to stop.

Jobs that are submitted together are waited for by one coroutine, which asks about all of them at once. Being cancelled
(Ctrl-C, a flow run cancelled in the UI) cancels the jobs; dying does not, and the next one with the same keys picks
them up again from their folders, results included if they have ended meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from dflop.errors import InfrastructureError, Interrupted, LaunchError
from dflop.launch.commands import NotNow
from dflop.launch.job import JobHandle, JobSpec, JobState, JobStatus, Launcher
from dflop.launch.journal import Change, Journal
from dflop.launch.results import has_all_results, submitted_in
from dflop.launch.tail import JobTails
from dflop.units import seconds

PATIENCE_S, PAUSE_S = 1800.0, 10.0
"""How long a controller may be silent when jobs are submitted, and how often it is asked again."""
_log = logging.getLogger(__name__)


async def run_jobs_async(
    launcher: Launcher,
    specs: Sequence[JobSpec],
    journal: Journal,
    *,
    keep_done: bool = False,
    on_changes: Callable[[Sequence[Change]], None] | None = None,
    on_log_line: Callable[[JobHandle, str], None] | None = None,
    poll_interval_s: float = 1.0,
) -> list[list[Any]]:
    """Return values of every task of every job, adopted or submitted together; a failed one ends none of the others.

    Their keys differ. With `keep_done` jobs that ended well before are kept, and only the others submitted.
    `on_changes` is told those whose state or what is said of it has changed in one poll, `on_log_line` new lines of
    rank 0 and the batch script of the first few jobs that run. Slurm is asked less often than every `poll_interval_s`.

    Raises:
        LaunchError: a job was refused or did not end well; raised when all have ended.
        asyncio.CancelledError: after the jobs were cancelled, or could not be.
    """
    submit = functools.partial(adopt_or_submit_all, launcher, specs, journal, keep_done=keep_done)
    handles = await _submitted(submit, launcher, journal)
    noted = journal.jobs()  # of those that had ended all was told before
    live = [handle for handle in handles if not noted[handle.id].state.is_final]
    tails = JobTails(on_log_line) if on_log_line else None
    seen: dict[JobHandle, JobStatus] = {}
    try:
        while live:
            found = await asyncio.to_thread(_poll, launcher, live, seen)
            changed = [(h, s) for h, s in found if h not in seen or s.gist != seen[h].gist]
            seen.update(found)
            if changed:
                journal.changes(changed)
                if on_changes:
                    on_changes(changed)
            if tails:
                tails.read(found)
            live = [handle for handle in live if not seen[handle].state.is_final]
            if live:
                await asyncio.sleep(poll_interval_s)
    except (asyncio.CancelledError, KeyboardInterrupt):
        # Not awaited: the loop is shutting down and a second cancellation must not leave the jobs behind.
        cancel_jobs(launcher, live, journal)
        raise
    return await asyncio.to_thread(_collect, launcher, handles, keep_done)


def adopt_or_submit_all(
    launcher: Launcher, specs: Sequence[JobSpec], journal: Journal, *, keep_done: bool = False
) -> list[JobHandle]:
    """Handles of jobs: what lives is adopted, whoever submitted it, or done and unseen; the rest is submitted together.

    A job that is known to have ended well is submitted again, for work may go on under its key, unless `keep_done`.

    Raises:
        LaunchError: a submission was refused.
        NotNow: Slurm may accept them later.
    """
    keys, noted = {spec.key for spec in specs}, journal.jobs()
    found = standing(launcher, journal, {spec.folder for spec in specs}, keys)
    handles: dict[str, JobHandle] = {}
    for wanted in (JobState.RUNNING, JobState.QUEUED, JobState.DONE):  # a job may be submitted by hand besides
        for job, status in found:
            if status.state is wanted:
                handles.setdefault(job.key, job)
    journal.submitted(*(job for job, _ in found if job.id not in noted and handles.get(job.key, job) == job))
    journal.changes([(job, s) for job, s in found if job.id in noted and handles.get(job.key) != job])
    journal.changes([(job, s) for job, s in found if job.key not in handles])
    latest = [found for key, found in journal.latest().items() if key in keys]
    if keep_done:
        done = (handle for handle, state in latest if state is JobState.DONE)
        handles |= {handle.key: handle for handle in done if has_all_results(handle)}
    missing = [spec for spec in specs if spec.key not in handles]
    # Slurm may know a lost job again by now: never two jobs of one work.
    lost = [handle for handle, state in journal.latest().values() if state is JobState.LOST]
    launcher.cancel(*(h for h in lost if h.backend == launcher.backend and h.key in {spec.key for spec in missing}))
    submitted = launcher.submit_all(missing) if missing else []
    journal.submitted(*submitted)
    handles |= {handle.key: handle for handle in submitted}
    return [handles[spec.key] for spec in specs]


def standing(
    launcher: Launcher, journal: Journal, folders: Iterable[Path], keys: Collection[str] | None = None
) -> list[Change]:
    """Jobs of a launcher, with certain keys or any, whose end is not noted, and how they stand now.

    Those that a journal knows come before those that a person, or a driver that died, submitted from folders.
    """
    noted = journal.jobs().values()
    asked = [job.handle for job in noted if not job.state.is_final]
    asked += submitted_in(folders, (job.handle for job in noted))
    asked = [job for job in asked if job.backend == launcher.backend and (keys is None or job.key in keys)]
    return list(zip(asked, launcher.poll_all(asked) if asked else [], strict=True))


async def _submitted(submit: Callable[[], list[JobHandle]], launcher: Launcher, journal: Journal) -> list[JobHandle]:
    began_s: float | None = None
    while True:
        submission = asyncio.ensure_future(asyncio.to_thread(submit))
        try:
            return await asyncio.shield(submission)
        except asyncio.CancelledError:
            with contextlib.suppress(LaunchError):  # sbatch cannot be stopped half-way; what it accepted can
                cancel_jobs(launcher, await submission, journal)
            raise
        except NotNow as error:
            if began_s is None:
                began_s = time.monotonic()
                _log.warning("%s; retrying for up to %s (%s)", error.what, seconds(PATIENCE_S), error.hint)
            if time.monotonic() - began_s >= PATIENCE_S:
                raise
        await asyncio.sleep(PAUSE_S)


def cancel_jobs(launcher: Launcher, handles: Sequence[JobHandle], journal: Journal) -> None:
    """Cancel jobs of a driver that ends, and note it; that they could not be cancelled is logged."""
    try:
        launcher.cancel(*handles)
    except LaunchError as error:
        _log.warning("%s; the jobs may be running: cancel them with `dflop cancel`", error.what)
    else:
        journal.changes([(handle, JobStatus(JobState.CANCELLED, "its driver was stopped")) for handle in handles])


def _poll(launcher: Launcher, live: Sequence[JobHandle], seen: dict[JobHandle, JobStatus]) -> list[Change]:
    try:
        return list(zip(live, launcher.poll_all(live), strict=True))
    except OSError as error:  # a stale handle, a disk that does not answer: no news is not bad news
        unknown = f"cannot check: {error.strerror or error}"
        return [(h, JobStatus(seen[h].state if h in seen else JobState.QUEUED, unknown)) for h in live]


def _collect(launcher: Launcher, handles: Sequence[JobHandle], is_kept: bool) -> list[list[Any]]:
    found, errors = list[list[Any]](), list[LaunchError | Interrupted]()
    for handle in handles:
        try:
            found.append(launcher.collect(handle))
        except (LaunchError, Interrupted) as error:
            errors.append(error)
    if not errors:
        return found
    # What a job did to itself outweighs what the machine did to another: trying again would not mend it.
    worst = min(errors, key=lambda e: (isinstance(e, InfrastructureError), isinstance(e, Interrupted)))
    if len(handles) > 1:
        kept = ", the others keep running" if is_kept and len(errors) < len(handles) else ""
        worst.what = f"{len(errors)} of {len(handles)} jobs failed{kept}: {worst.what}"
    raise worst
