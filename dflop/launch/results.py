"""What jobs left in their folders: which were submitted, results of tasks, and the error that started the trouble.

When one rank of a distributed job fails, its peers fail too, with errors that say only that somebody hung up, often
earlier than the culprit, which is still unwinding. So causes are ranked: killed by a signal, then tracebacks of the
payload's own, then such echoes; within a class the earliest wins.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dflop.errors import DflopError, InfrastructureError, Interrupted, LaunchError, PayloadError, is_echo
from dflop.launch.job import CHECKPOINTED, SUBMITTED, JobHandle, JobState, JobStatus, log_paths
from dflop.launch.payload import Payload

TAIL_LINES = 20
BATCH_LOG, INTERRUPTED = "batch.log", "interrupted"
"""Suffixes of a job's files: what its batch script and srun say; why it ended with its state on disk, if it did."""
CLUSTER = "cluster"
"""File of a submission folder: which of several Slurm clusters accepted the jobs."""
_SIGNAL_9 = (
    "signal 9 is usually the kernel's out-of-memory killer (see dmesg): use fewer tokens per microbatch or more memory"
)


class TaskResult(NamedTuple):
    """What one task left: a value, or a traceback."""

    rank: int
    ok: bool
    value: Any
    trace: str
    finished_at_s: float

    @property
    def headline(self) -> str:
        """Last line of the traceback that names the exception."""
        lines = [line for line in self.trace.splitlines() if line.strip()]
        named = [line for line in lines if re.match(r"[\w.]+(:|$)", line)]
        return (named or lines or [""])[-1]

    @property
    def message(self) -> str:
        """What an error of ours says; empty for any other, of which the traceback is all there is."""
        _, is_ours, said = f"\n{self.trace}".rpartition(f"\n{DflopError.__module__}.")
        name, _, message = said.partition(": ")
        has_another = "\nTraceback (most recent call last):" in said  # which came of it
        return message.strip() if is_ours and name.isidentifier() and not has_another else ""


class DeadTask(NamedTuple):
    """The first task that ended badly, in the words of who started it."""

    rank: int
    how: str
    """It ended: `died (signal 9)`, `Exited with exit code 1`."""
    on: str = ""
    """Node, with a preposition."""

    @property
    def was_killed(self) -> bool:
        """By a signal."""
        return not self.how.lower().startswith("exited")

    @property
    def reason(self) -> str:
        return f"rank {self.rank} {self.how}{self.on}"


def payload_of(path: Path) -> Payload:
    """What the tasks of the job run whose pickle this is."""
    payload: Payload = pickle.loads(path.read_bytes()).function
    return payload


def handle_of(path: Path) -> JobHandle:
    """The job whose pickle this is, which gets its name once the backend has taken the job.

    A driver that dies behind that leaves a job that the next one finds; before that, one that finds no work.
    """
    payload, job_id, cluster = payload_of(path), path.name.removesuffix(SUBMITTED), ""
    spec, at_s = payload.spec, payload.submitted_at_s
    with contextlib.suppress(FileNotFoundError):
        cluster = (path.parent / CLUSTER).read_text()
    return JobHandle(payload.backend, job_id, spec.name, spec.key, path.parent, spec.resources.num_tasks, at_s, cluster)


def submitted_in(folders: Iterable[Path], known: Iterable[JobHandle]) -> list[JobHandle]:
    """Jobs that were submitted from these folders, but for the known ones; oldest first."""
    found, skipped = list[JobHandle](), {handle.path("submitted.pkl") for handle in known}
    for folder in {*folders}:
        for path in folder.absolute().glob(f"**/*{SUBMITTED}"):
            # Cut off by a full disk, of another version, gone meanwhile: nobody's.
            with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError):
                found += [] if path in skipped else [handle_of(path)]
    return sorted(found, key=lambda handle: (handle.submitted_at_s, len(handle.job_id), handle.job_id))


def result_path(handle: JobHandle, rank: int) -> Path:
    """Pickle that the task of this rank leaves when its entry returned or raised (named as submitit does)."""
    return handle.path(f"{rank}_result.pkl")


def has_all_results(handle: JobHandle) -> bool:
    """Every task has returned or raised. One `stat` per task."""
    return all(os.path.exists(result_path(handle, rank)) for rank in range(handle.num_tasks))


def is_done(handle: JobHandle) -> bool:
    """Every task has returned."""
    return has_all_results(handle) and status_from_results(handle).state is JobState.DONE


def read_results(handle: JobHandle) -> list[TaskResult]:
    """Results of the tasks that left one, by rank."""
    found = []
    for rank in range(handle.num_tasks):
        if (content := handle.read(f"{rank}_result.pkl")) is not None:
            outcome, value = pickle.loads(content)
            ok = outcome == "success"
            with contextlib.suppress(OSError):  # gone meanwhile
                at_s = os.stat(result_path(handle, rank)).st_mtime
                found.append(TaskResult(rank, ok, value if ok else None, "" if ok else str(value), at_s))
    return found


def first_error(results: Sequence[TaskResult], dead: DeadTask | None = None) -> TaskResult | None:
    """The traceback that explains the others; None where none does.

    Tracebacks of the peers of a killed task explain nothing, nor do echoes of one that ended without a traceback.
    """
    failed = [r for r in results if not r.ok]
    error = min(failed, key=lambda r: (is_echo(r.headline), r.finished_at_s), default=None)
    if error is None or dead is None:
        return error
    is_no_cause = is_echo(error.headline) and dead.rank not in {r.rank for r in results}
    return None if dead.was_killed or is_no_cause else error


def status_from_results(handle: JobHandle, dead: DeadTask | None = None) -> JobStatus:
    """Final status of a job of which only the files are left, and who ended badly, if anybody did."""
    results = read_results(handle)
    if dead is None and sum(result.ok for result in results) == handle.num_tasks:
        return JobStatus(JobState.DONE)
    return explain(handle, JobStatus(JobState.FAILED, _is_missing(_first_missing(results))), dead)


def explain(handle: JobHandle, status: JobStatus, dead: DeadTask | None) -> JobStatus:
    """What is better known than by the scheduler about a job that FAILED, was LOST or ran out of memory."""
    if (why := handle.read(INTERRUPTED)) is not None:
        return JobStatus(JobState.INTERRUPTED, f"{CHECKPOINTED}; {why.decode().strip()}".removesuffix("; "))
    if status.state is not JobState.OOM:
        if (error := first_error(read_results(handle), dead)) is not None:
            return JobStatus(JobState.FAILED, f"rank {error.rank}: {error.headline}")
        if dead is not None and re.search(rf"code {Interrupted.exit_code}\b", dead.how):
            return JobStatus(JobState.INTERRUPTED, CHECKPOINTED)
    if dead is None:
        return status
    is_lost = status.state is JobState.LOST and dead.was_killed
    return JobStatus(JobState.FAILED if is_lost else status.state, dead.reason)


def collect_values(handle: JobHandle, status: JobStatus, dead: DeadTask | None = None) -> list[Any]:
    """Values of all tasks by rank, or the error that explains why there are none.

    Where there is no traceback, the log of the first task that died counts, if that is known.

    Raises:
        Interrupted: the job stopped on request and left a checkpoint.
        LaunchError: with what ended it, the rank and its log.
        PayloadError: with the first real error of the payload, its rank and its log.
    """
    if not status.state.is_final:
        raise LaunchError(f"{handle} is still {status.state}", hint="wait for it before collecting results")
    if status.state is JobState.INTERRUPTED:
        what = f"{handle} was stopped: {status.reason}"
        raise Interrupted(what, hint="start it again to resume from there")
    results = read_results(handle)
    if status.state is JobState.DONE and len(results) == handle.num_tasks and all(r.ok for r in results):
        return [r.value for r in results]
    # Tracebacks of a job that was ended from outside explain nothing.
    error = first_error(results, dead) if status.state is JobState.FAILED else None
    if error is not None:
        who = f"{handle} {status.state}: rank {error.rank} of {handle.num_tasks}"
        said = f" raised: {error.message}" if error.message else f" raised {error.headline}\n{error.trace.rstrip()}"
        raise PayloadError(who + said, where=str(_log_of(handle, error.rank)))
    rank = dead.rank if dead is not None else _first_missing(results) % handle.num_tasks
    log, kind, hint = _log_of(handle, rank), LaunchError, ""
    if status.state is JobState.OOM or "signal 9" in status.reason:
        hint = _SIGNAL_9
    elif status.state is JobState.TIMEOUT:
        hint = "raise the job's time limit"
    elif status.state.is_infrastructure_failure:
        kind, hint = InfrastructureError, "the machine failed, not the job: submit again"
    what = f"{handle} {status.state}: {status.reason or _is_missing(rank)}"
    raise kind(what + _tail(log), where=str(log), hint=hint)


def _first_missing(results: Sequence[TaskResult]) -> int:
    return next((rank for rank, result in enumerate(results) if result.rank != rank), len(results))


def _is_missing(rank: int) -> str:
    return f"rank {rank} left no result and no traceback"


def _log_of(handle: JobHandle, rank: int) -> Path:
    """Where the words of a rank are, of what should have started it, or the job's folder: something that is there."""
    logs = (log_paths(handle, rank).stderr, handle.path(BATCH_LOG), handle.path("controller.log"))
    return next((log for log in logs if os.path.exists(log)), handle.folder)


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError):
        return "".join(f"\n  | {line}" for line in log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
    return ""
