"""Waits for jobs without owning them: adopts what lives, submits what does not, cancels only when told to stop.

Waiting is a coroutine that is asleep nearly always; jobs that are submitted together are waited for by one, which asks
about all of them at once, so one process can follow hundreds of jobs. Being cancelled (Ctrl-C, a flow run cancelled in
the UI) cancels the jobs; dying does not, and the next one with the same keys picks them up again from their folders,
results included if they have ended meanwhile. A controller that does not answer is waited for, at submission, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from dflop.errors import InfrastructureError, Interrupted, LaunchError
from dflop.launch.commands import ControllerAway
from dflop.launch.job import JobHandle, JobSpec, JobState, JobStatus, Launcher, log_paths
from dflop.launch.journal import Change, Journal
from dflop.launch.submitted import adopt_or_submit_all
from dflop.launch.tail import LogTail
from dflop.units import seconds

OnState = Callable[[JobHandle, JobStatus], None]
OnChanges = Callable[[Sequence[Change]], None]
OnLogLine = Callable[[str], None]
OnJobLine = Callable[[JobHandle, str], None]

MAX_TAILED = 8
"""Jobs whose logs are followed at the same time; of a large array nobody reads more."""
PATIENCE_S, PAUSE_S = 1800.0, 10.0
"""How long a controller may be silent when jobs are submitted, and how often it is asked again."""
_log = logging.getLogger(__name__)


async def wait_all(
    launcher: Launcher,
    handles: Sequence[JobHandle],
    *,
    on_changes: OnChanges | None = None,
    on_log_line: OnJobLine | None = None,
    poll_interval_s: float = 1.0,
) -> list[JobStatus]:
    """Final statuses of several jobs; what happens to all of them in one poll is told in one call.

    Args:
        launcher: Any launcher of the handles' backend.
        handles: The jobs; may come from other processes.
        on_changes: Called with those whose state or what is said of it has changed.
        on_log_line: Called for new lines of rank 0's stdout and stderr, of the first few jobs that run.
        poll_interval_s: Pause between polls. The Slurm backend limits its own calls to squeue further.

    Raises:
        asyncio.CancelledError: after the jobs that had not ended were cancelled, or could not be.
    """
    tails = _Tails(on_log_line) if on_log_line else None
    seen: dict[JobHandle, JobStatus] = {}
    live = list(handles)
    try:
        while live:
            found = await asyncio.to_thread(_poll, launcher, live, seen)
            changed = [(h, s) for h, s in found if h not in seen or s.gist != seen[h].gist]
            seen.update(found)
            if changed and on_changes:
                on_changes(changed)
            if tails:
                tails.read(found)
            live = [handle for handle in live if not seen[handle].state.is_final]
            if live:
                await asyncio.sleep(poll_interval_s)
    except (asyncio.CancelledError, KeyboardInterrupt):
        # Not awaited: the loop is shutting down and a second cancellation must not leave the jobs behind.
        _cancel(launcher, live)
        raise
    return [seen[handle] for handle in handles]


def _cancel(launcher: Launcher, handles: Sequence[JobHandle]) -> None:
    """Whoever is told to stop stops; that the jobs could not be told is said."""
    try:
        launcher.cancel(*handles)
    except LaunchError as error:
        _log.warning("%s; the jobs may be running: cancel them with `dflop cancel`", error.what)


def _poll(launcher: Launcher, live: Sequence[JobHandle], seen: dict[JobHandle, JobStatus]) -> list[Change]:
    try:
        return list(zip(live, launcher.poll_all(live), strict=True))
    except OSError as error:  # a stale handle, a disk that does not answer: no news is not bad news
        unknown = f"cannot look: {error.strerror or error}"
        return [(h, JobStatus(seen[h].state if h in seen else JobState.QUEUED, unknown)) for h in live]


class _Tails:
    """Follows the logs of the first few jobs that run; each that ends makes room for another."""

    def __init__(self, on_line: OnJobLine) -> None:
        self._on_line = on_line
        self._tails: dict[JobHandle, list[LogTail]] = {}

    def read(self, statuses: Sequence[Change]) -> None:
        for handle, status in statuses:
            is_last = status.state.is_final
            if handle not in self._tails and not is_last and len(self._tails) >= MAX_TAILED:
                continue
            if handle not in self._tails and status.state is JobState.QUEUED:
                continue
            paths = (*log_paths(handle, 0), handle.path("batch.log"))
            for tail in self._tails.setdefault(handle, [LogTail(path) for path in paths]):
                for line in tail.read(is_last=is_last):
                    self._on_line(handle, line)
            if is_last:
                del self._tails[handle]


async def run_job_async(
    launcher: Launcher,
    spec: JobSpec,
    journal: Journal,
    *,
    on_state: OnState | None = None,
    on_log_line: OnLogLine | None = None,
    poll_interval_s: float = 1.0,
) -> list[Any]:
    """Return value of every task of a job, adopted or submitted.

    Raises:
        LaunchError: the job was refused or did not end well; the message shows the first real error.
        asyncio.CancelledError: after the job was cancelled.
    """

    def on_changes(changes: Sequence[Change]) -> None:
        if on_state:
            for change in changes:
                on_state(*change)

    def on_line(_: JobHandle, line: str) -> None:
        if on_log_line:
            on_log_line(line)

    found = await run_jobs_async(
        launcher, [spec], journal, on_changes=on_changes, on_log_line=on_line, poll_interval_s=poll_interval_s
    )
    return found[0]


async def run_jobs_async(
    launcher: Launcher,
    specs: Sequence[JobSpec],
    journal: Journal,
    *,
    keep_done: bool = False,
    on_changes: OnChanges | None = None,
    on_log_line: OnJobLine | None = None,
    poll_interval_s: float = 1.0,
) -> list[list[Any]]:
    """Return values of every task of every job, adopted or submitted together; a failed one ends none of the others.

    Args:
        launcher: Where to submit.
        specs: The jobs.
        journal: Of the run.
        keep_done: Whether jobs that ended well before are kept, and only the others submitted.
        on_changes: As of `wait_all`.
        on_log_line: As of `wait_all`.
        poll_interval_s: As of `wait_all`.

    Raises:
        LaunchError: a job was refused or did not end well; raised when all have ended.
        asyncio.CancelledError: after the jobs were cancelled, or could not be.
    """

    def note(changes: Sequence[Change]) -> None:
        journal.changes(changes)
        if on_changes:
            on_changes(changes)

    handles = await _submitted(launcher, specs, journal, keep_done)
    unended = [handle for handle in handles if journal.ended(handle.key) is None]  # of the others all was told before
    await wait_all(launcher, unended, on_changes=note, on_log_line=on_log_line, poll_interval_s=poll_interval_s)
    return await asyncio.to_thread(_collect, launcher, handles, keep_done)


async def _submitted(
    launcher: Launcher, specs: Sequence[JobSpec], journal: Journal, keep_done: bool
) -> list[JobHandle]:
    began_s: float | None = None
    while True:
        submission = asyncio.ensure_future(
            asyncio.to_thread(adopt_or_submit_all, launcher, specs, journal, keep_done=keep_done)
        )
        try:
            return await asyncio.shield(submission)
        except asyncio.CancelledError:
            with contextlib.suppress(LaunchError):
                _cancel(launcher, await submission)  # sbatch cannot be stopped half-way; what it accepted can
            raise
        except ControllerAway as error:
            if began_s is None:
                began_s = time.monotonic()
                _log.warning("%s; tried again for up to %s", error.what, seconds(PATIENCE_S))
            if time.monotonic() - began_s >= PATIENCE_S:
                raise
        await asyncio.sleep(PAUSE_S)


def _collect(launcher: Launcher, handles: Sequence[JobHandle], is_kept: bool) -> list[list[Any]]:
    found: list[list[Any]] = []
    errors: list[LaunchError | Interrupted] = []
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
        kept = ", the others are kept" if is_kept and len(errors) < len(handles) else ""
        worst.what = f"{len(errors)} of {len(handles)} jobs failed{kept}: {worst.what}"
    raise worst
