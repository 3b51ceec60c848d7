"""Waits for jobs without owning them: adopt what lives, submit what does not, cancel only when told to stop.

Waiting is a coroutine that is asleep nearly always, so one process can follow hundreds of jobs. Being cancelled
(Ctrl-C, a flow run cancelled in the UI) cancels the job; dying does not, and the next `run_job` with the same key
picks the job up again from the journal, result included if it has ended meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dflop.launch.job import JobHandle, JobSpec, JobState, JobStatus, Launcher, log_paths
from dflop.launch.journal import Journal
from dflop.launch.tail import LogTail

OnState = Callable[[JobHandle, JobStatus], None]
OnLogLine = Callable[[str], None]


async def wait(
    launcher: Launcher,
    handle: JobHandle,
    *,
    on_state: OnState | None = None,
    on_log_line: OnLogLine | None = None,
    poll_interval_s: float = 1.0,
) -> JobStatus:
    """Final status of the job.

    Args:
        launcher: Any launcher of the handle's backend.
        handle: The job; may come from another process.
        on_state: Called at every change of state, the first observation included.
        on_log_line: Called for new lines of rank 0's stdout and stderr, a capped number per poll.
        poll_interval_s: Pause between polls. The Slurm backend limits its own calls to squeue further.

    Raises:
        asyncio.CancelledError: after the job was cancelled.
    """
    tails = [LogTail(path) for path in log_paths(handle, 0)] if on_log_line else []
    seen: JobState | None = None
    try:
        while True:
            status = await asyncio.to_thread(launcher.poll, handle)
            if status.state is not seen and on_state:
                on_state(handle, status)
            seen = status.state
            for tail in tails:
                for line in tail.read(is_last=seen.is_final):
                    if on_log_line:
                        on_log_line(line)
            if seen.is_final:
                return status
            await asyncio.sleep(poll_interval_s)
    except (asyncio.CancelledError, KeyboardInterrupt):
        # Not awaited: the loop is shutting down and a second cancellation must not leave the job behind.
        launcher.cancel(handle)
        raise


def adopt_or_submit(launcher: Launcher, spec: JobSpec, journal: Journal) -> JobHandle:
    """The live or unseen-ended job with the same key if there is one, else a new submission, noted in the journal.

    Raises:
        LaunchError: the submission was refused.
    """
    handle = journal.live(spec.key)
    if handle is not None and handle.backend == launcher.backend:
        status = launcher.poll(handle)
        if not status.state.is_final or status.state is JobState.DONE:
            return handle
        journal.changed(handle, status)
    handle = launcher.submit(spec)
    journal.submitted(handle)
    return handle


def run_job(
    launcher: Launcher,
    spec: JobSpec,
    journal: Journal,
    *,
    on_state: OnState | None = None,
    on_log_line: OnLogLine | None = None,
    poll_interval_s: float = 1.0,
) -> list[Any]:
    """Return value of every task of the job, adopted or submitted; blocks until it has ended.

    Raises:
        LaunchError: the job was refused or did not end well; the message shows the first real error.
    """
    handle = adopt_or_submit(launcher, spec, journal)
    asyncio.run(_follow(launcher, handle, journal, on_state, on_log_line, poll_interval_s))
    return launcher.collect(handle)


async def run_job_async(
    launcher: Launcher,
    spec: JobSpec,
    journal: Journal,
    *,
    on_state: OnState | None = None,
    on_log_line: OnLogLine | None = None,
    poll_interval_s: float = 1.0,
) -> list[Any]:
    """`run_job` for callers that have an event loop, such as flow tasks.

    Raises:
        LaunchError: the job was refused or did not end well; the message shows the first real error.
        asyncio.CancelledError: after the job was cancelled.
    """
    submission = asyncio.ensure_future(asyncio.to_thread(adopt_or_submit, launcher, spec, journal))
    try:
        handle = await asyncio.shield(submission)
    except asyncio.CancelledError:
        launcher.cancel(await submission)  # sbatch cannot be stopped half-way; what it accepted can
        raise
    await _follow(launcher, handle, journal, on_state, on_log_line, poll_interval_s)
    return await asyncio.to_thread(launcher.collect, handle)


async def _follow(
    launcher: Launcher,
    handle: JobHandle,
    journal: Journal,
    on_state: OnState | None,
    on_log_line: OnLogLine | None,
    poll_interval_s: float,
) -> None:
    def note(handle: JobHandle, status: JobStatus) -> None:
        journal.changed(handle, status)
        if on_state:
            on_state(handle, status)

    await wait(launcher, handle, on_state=note, on_log_line=on_log_line, poll_interval_s=poll_interval_s)
