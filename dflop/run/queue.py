"""What the cluster's queue and a run's journal know of jobs that have not ended."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from dflop.errors import LaunchError
from dflop.launch import JobHandle, JobState, JobStatus, Journal, Launcher
from dflop.launch.commands import COMMENT, run_command
from dflop.records import JobRecord
from dflop.run.directory import RunDir
from dflop.run.driver_lock import driver_of
from dflop.run.launcher import launcher_of


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that has not ended."""

    job_id: str
    """Of an array that waits as a whole, `12_[0-3]`."""
    run_id: str
    state: str
    """In the words of its scheduler, small."""
    name: str


def jobs_in_queue() -> list[QueuedJob]:
    """Jobs of this user that dflop has submitted and that have not ended; LaunchError where squeue does not answer."""
    # The name comes last: it may hold anything.
    rows = _slurm("squeue", "-h", "-u", str(os.getuid()), "-o", "%i|%T|%k|%j").splitlines()
    fields = [row.split("|", 3) for row in rows if row.count("|") >= 3]
    return [
        QueuedJob(job_id, comment.removeprefix(COMMENT), state.lower(), name)
        for job_id, state, comment, name in fields
        if comment.startswith(COMMENT)
    ]


def scancel(jobs: Sequence[QueuedJob]) -> None:
    """End jobs; a LaunchError where scancel does not answer."""
    _slurm("scancel", *(job.job_id for job in jobs))


def journalled(run: RunDir) -> list[tuple[JobRecord, JobRecord]]:
    """The first and the last thing that the journal of a run says of each of its jobs, in the order of submission."""
    found: dict[str, tuple[JobRecord, JobRecord]] = {}
    for record in Journal(run.path, run.run_id).records():
        first, _ = found.get(record.job_id, (record, record))
        found[record.job_id] = first, record
    return list(found.values())


def live_jobs(run: RunDir, launcher: Launcher) -> list[tuple[JobHandle, JobStatus]]:
    """Jobs of a run that have not ended, whoever submitted them; ends that nobody saw are noted in the journal."""
    journal = Journal(run.path, run.run_id)
    handles = [h for h, s in journal.latest().values() if not s.is_final and h.backend == launcher.backend]
    found = list(zip(handles, launcher.poll_all(handles) if handles else [], strict=True))
    journal.changes([(handle, status) for handle, status in found if status.state.is_final])
    return [(handle, status) for handle, status in found if not status.state.is_final]


def is_over(run: RunDir, handle: JobHandle | None) -> bool:
    """Whether a job has ended, by the journal, which its driver keeps; without a driver, by asking for it.

    None stands for what runs beside the jobs, and ends when no job is left.
    """
    ended = {last.job_id: JobState(last.state).is_final for _, last in journalled(run)}
    if handle is None:
        return all(ended.values())
    if ended.get(handle.job_id, True):
        return True
    if driver_of(run) is not None:
        return False
    live = live_jobs(run, launcher_of(run, run.config()))
    return handle.job_id not in {h.job_id for h, _ in live}


def backend_of(run: RunDir) -> str:
    """Where the jobs of a run run."""
    return str(run.state().get("backend") or run.config().cluster.backend)


def check_reach(run: RunDir) -> None:
    """Refuse to judge jobs that are processes of another machine.

    Raises:
        LaunchError: the run's jobs are, and its driver was on that machine.
    """
    host = run.state().get("by", {}).get("host", "")
    if backend_of(run) != "slurm" and host not in ("", socket.gethostname()):
        what = f"the jobs of run `{run.run_id}` are processes of {host}"
        raise LaunchError(what, where=str(run.path), hint=f"run it on {host}")


def _slurm(*command: str) -> str:
    done = run_command(command)
    # A job that ended in between is no news.
    if done.returncode != 0 and "Invalid job id" not in done.stderr:
        raise LaunchError(f"`{command[0]}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
