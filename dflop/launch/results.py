"""Reads what the tasks of a job left behind, and finds the error that started the trouble.

When one rank of a distributed job fails, its peers fail too, with errors that say only that somebody hung up, often
earlier than the culprit, which is still unwinding. So causes are ranked: killed by a signal, then tracebacks of the
payload's own, then such echoes; within a class the earliest wins.
"""

from __future__ import annotations

import os
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflop.errors import DflopError, InfrastructureError, Interrupted, LaunchError, PayloadError, is_echo
from dflop.launch.job import JobHandle, JobState, JobStatus, log_paths

TAIL_LINES = 20
_OURS = f"{DflopError.__module__}."


@dataclass(frozen=True, slots=True)
class TaskResult:
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
        _, is_ours, said = f"\n{self.trace}".rpartition(f"\n{_OURS}")
        if "\nTraceback (most recent call last):" in said:
            return ""  # another one came of it
        name, _, message = said.partition(": ")
        return message.strip() if is_ours and name.isidentifier() else ""

    @property
    def is_echo(self) -> bool:
        """The task failed because another one had."""
        return not self.ok and is_echo(self.headline)


def result_path(handle: JobHandle, rank: int) -> Path:
    """Pickle that the task of this rank leaves when its entry returned or raised (named as submitit does)."""
    return handle.path(f"{rank}_result.pkl")


def has_all_results(handle: JobHandle) -> bool:
    """Every task has returned or raised. One `stat` per task."""
    return all(_age(handle, rank) is not None for rank in range(handle.num_tasks))


def _age(handle: JobHandle, rank: int) -> float | None:
    """When a task of this job left its result; of an older job with the same id, nothing is left."""
    try:
        at_s = os.stat(result_path(handle, rank)).st_mtime
    except OSError:  # a stale handle, too
        return None
    return at_s if handle.is_ours(at_s) else None


def read_results(handle: JobHandle) -> list[TaskResult]:
    """Results of the tasks that left one, by rank."""
    found = []
    for rank in range(handle.num_tasks):
        content, at_s = handle.read(f"{rank}_result.pkl"), _age(handle, rank)
        if content is not None and at_s is not None:
            outcome, value = pickle.loads(content)
            ok = outcome == "success"
            trace = "" if ok else str(value)
            found.append(TaskResult(rank, ok, value if ok else None, trace, at_s))
    return found


def first_error(results: list[TaskResult]) -> TaskResult | None:
    """The traceback that explains the others, or None when no task left one."""
    failed = [r for r in results if not r.ok]
    return min(failed, key=lambda r: (r.is_echo, r.finished_at_s), default=None)


def status_from_results(handle: JobHandle) -> JobStatus:
    """Final status of a job of which only the files are left."""
    results = read_results(handle)
    error = first_error(results)
    if error is not None:
        return JobStatus(JobState.FAILED, f"rank {error.rank}: {error.headline}")
    missing = sorted(set(range(handle.num_tasks)) - {r.rank for r in results})
    if missing:
        return JobStatus(JobState.FAILED, f"rank {missing[0]} left no result and no traceback")
    return JobStatus(JobState.DONE)


def collect_values(
    handle: JobHandle, status: JobStatus, *, ended_by: int | None = None, was_killed: bool = False
) -> list[Any]:
    """Values of all tasks by rank, or the error that explains why there are none.

    Args:
        handle: The job.
        status: Its final status.
        ended_by: Task that was the first to end badly, if that is known: where there is no traceback, its log counts.
        was_killed: That was by a signal, which outranks any traceback.

    Raises:
        Interrupted: the job was told to stop and left a checkpoint.
        LaunchError: with what ended it, the rank and its log.
        PayloadError: with the first real error of the payload, its rank and its log.
    """
    if not status.state.is_final:
        raise LaunchError(f"{handle} is still {status.state}", hint="wait for it before collecting")
    if status.state is JobState.INTERRUPTED:
        raise Interrupted(
            f"{handle} was told to stop: {status.reason}", hint="start it again, and it goes on from there"
        )
    results = read_results(handle)
    if status.state is JobState.DONE and len(results) == handle.num_tasks and all(r.ok for r in results):
        return [r.value for r in results]
    error = first_error(results)
    # Tracebacks of a job that was ended from outside, or of the peers of a killed rank, explain nothing.
    if error is not None and not was_killed and status.state is JobState.FAILED:
        log = log_of(handle, error.rank)
        who = f"{handle} {status.state}: rank {error.rank} of {handle.num_tasks}"
        if error.message:
            raise PayloadError(f"{who} raised: {error.message}", where=str(log))
        raise PayloadError(f"{who} raised {error.headline}\n{error.trace.rstrip()}", where=str(log))
    missing = sorted(set(range(handle.num_tasks)) - {r.rank for r in results})
    rank = ended_by if ended_by is not None else (missing or [0])[0]
    log = log_of(handle, rank)
    what = f"{handle} {status.state}: {status.reason or f'rank {rank} left no result and no traceback'}"
    kind = InfrastructureError if status.state.is_infrastructure_failure else LaunchError
    raise kind(what + _tail(log), where=str(log), hint=_hint(status))


def log_of(handle: JobHandle, rank: int) -> Path:
    """Where the words of a rank are, of what should have started it, or the job's folder: something that is there."""
    logs = (log_paths(handle, rank).stderr, handle.path("batch.log"), handle.path("controller.log"))
    return next((log for log in logs if os.path.exists(log)), handle.folder)


def _hint(status: JobStatus) -> str:
    if status.state is JobState.OOM or "signal 9" in status.reason:
        return (
            "the kernel kills with signal 9 when memory runs out (see dmesg): fewer tokens per microbatch, more memory"
        )
    if status.state is JobState.TIMEOUT:
        return "raise the job's time limit"
    if status.state.is_infrastructure_failure:
        return "the machine failed, not the payload: submit again"
    return ""


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    except OSError:
        return ""
    return "\n" + "\n".join(f"  | {line}" for line in lines) if lines else ""
