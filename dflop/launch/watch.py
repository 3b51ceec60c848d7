"""What Slurm says about our jobs, asked as seldom and as broadly as possible.

One `squeue` for all jobs, at most every `poll_interval_s`; it also shows jobs that ended within MinJobAge (300 s by
default). A job it does not know is looked up in `sacct`, where accounting works (many sites have none), then with
`scontrol show job`. A job nobody knows is LOST, but only after a grace: controllers restart and lag. A failing squeue
changes nothing: no news is not bad news.
"""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dflop.launch.job import JobState, JobStatus

COMMAND_TIMEOUT_S = 60
SACCT_RETRY_S = 600

STATES = {
    "PENDING": JobState.QUEUED,
    "CONFIGURING": JobState.QUEUED,
    "REQUEUED": JobState.QUEUED,
    "REQUEUE_FED": JobState.QUEUED,
    "REQUEUE_HOLD": JobState.QUEUED,
    "RESV_DEL_HOLD": JobState.QUEUED,
    "SPECIAL_EXIT": JobState.QUEUED,
    "RUNNING": JobState.RUNNING,
    "COMPLETING": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STAGE_OUT": JobState.RUNNING,
    "STOPPED": JobState.RUNNING,
    "SUSPENDED": JobState.RUNNING,
    "COMPLETED": JobState.DONE,
    "FAILED": JobState.FAILED,
    "CANCELLED": JobState.CANCELLED,
    "REVOKED": JobState.CANCELLED,
    "TIMEOUT": JobState.TIMEOUT,
    "DEADLINE": JobState.TIMEOUT,
    "OUT_OF_MEMORY": JobState.OOM,
    "BOOT_FAIL": JobState.NODE_FAIL,
    "NODE_FAIL": JobState.NODE_FAIL,
    "PREEMPTED": JobState.PREEMPTED,
}
"""Every job state of `man squeue`. submitit's table takes SUSPENDED, CONFIGURING and REQUEUE_HOLD for ended."""

Command = Callable[[Sequence[str]], subprocess.CompletedProcess[str]]


def run_command(args: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a Slurm client; a missing or hanging one is an ordinary failure."""
    try:
        return subprocess.run(args, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(args, 127, "", str(error))


@dataclass(slots=True)
class _Watched:
    status: JobStatus
    missing_since_s: float | None = None


class SlurmWatcher:
    """Statuses of all registered jobs, refreshed together; safe to share between threads.

    Args:
        poll_interval_s: Least time between two squeue calls; 30 s is what login nodes put up with.
        lost_after_s: How long a job may be unknown to everyone before it is LOST.
        command: Runs a client; replaced in tests.
        clock: Monotonic seconds; replaced in tests.
    """

    def __init__(
        self,
        *,
        poll_interval_s: float = 30.0,
        lost_after_s: float = 120.0,
        command: Command = run_command,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.poll_interval_s = poll_interval_s
        self.lost_after_s = lost_after_s
        self._command = command
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: dict[str, _Watched] = {}
        self._refreshed_at_s = float("-inf")
        self._sacct_retry_at_s = float("-inf")

    def submitted(self, job_id: str) -> None:
        """Watch a job that was accepted just now, so that nobody need be asked about it at once."""
        with self._lock:
            self._jobs[job_id] = _Watched(JobStatus(JobState.QUEUED, "submitted"))

    def status(self, job_id: str) -> JobStatus:
        """Last known status, at most `poll_interval_s` old; a job from another process is asked for at once."""
        with self._lock:
            is_foreign = job_id not in self._jobs
            job = self._jobs.setdefault(job_id, _Watched(JobStatus(JobState.QUEUED, "not yet seen")))
            if is_foreign or self._clock() - self._refreshed_at_s >= self.poll_interval_s:
                self._refresh()
            return job.status

    def _refresh(self) -> None:
        live = {job_id: job for job_id, job in self._jobs.items() if not job.status.state.is_final}
        self._refreshed_at_s = self._clock()
        if not live:
            return
        found, error = self._ask_squeue(live)
        for job_id in live.keys() & found.keys():
            live[job_id].status = found[job_id]
            live[job_id].missing_since_s = None
        missing = sorted(live.keys() - found.keys())
        if error:
            for job_id in missing:
                live[job_id].status = live[job_id].status._replace(reason=f"squeue failed: {error}")
            return
        recorded = self._ask_sacct(missing)
        for job_id in missing:
            status = recorded.get(job_id) or self._ask_scontrol(job_id)
            self._settle(live[job_id], status)

    def _settle(self, job: _Watched, status: JobStatus | None) -> None:
        if status is not None:
            job.status, job.missing_since_s = status, None
            return
        now = self._clock()
        job.missing_since_s = now if job.missing_since_s is None else job.missing_since_s
        if now - job.missing_since_s >= self.lost_after_s:
            job.status = JobStatus(JobState.LOST, "unknown to squeue, sacct and scontrol")
        else:
            job.status = job.status._replace(reason="Slurm does not know it; waiting before calling it lost")

    def _ask_squeue(self, job_ids: Iterable[str]) -> tuple[dict[str, JobStatus], str]:
        done = self._command(["squeue", "-h", "-t", "all", "-o", "%i|%T|%r", "-j", ",".join(sorted(job_ids))])
        # With one unknown id squeue fails, with several it exits 0 and says the same words.
        if done.returncode != 0 and "Invalid job id" not in done.stderr:
            return {}, _last_line(done.stderr) or f"exit code {done.returncode}"
        return dict(_parse(line) for line in done.stdout.splitlines() if line.count("|") >= 2), ""

    def _ask_sacct(self, job_ids: Sequence[str]) -> dict[str, JobStatus]:
        if not job_ids or self._clock() < self._sacct_retry_at_s:
            return {}
        done = self._command(["sacct", "-X", "-n", "-P", "-o", "JobID,State,Reason", "-j", ",".join(job_ids)])
        if done.returncode != 0:
            self._sacct_retry_at_s = self._clock() + SACCT_RETRY_S
            return {}
        return dict(_parse(line) for line in done.stdout.splitlines() if line.count("|") >= 2)

    def _ask_scontrol(self, job_id: str) -> JobStatus | None:
        done = self._command(["scontrol", "-o", "show", "job", job_id])
        state = re.search(r"\bJobState=(\S+)", done.stdout)
        reason = re.search(r"\bReason=(\S+)", done.stdout)
        if done.returncode != 0 or state is None:
            return None
        return _status(state[1], reason[1] if reason else "")


def _parse(line: str) -> tuple[str, JobStatus]:
    job_id, state, reason = line.strip().split("|", 2)
    return job_id, _status(state, reason)


def _status(slurm_state: str, reason: str) -> JobStatus:
    word = slurm_state.split()[0] if slurm_state.strip() else ""  # sacct: "CANCELLED by 1000"
    known = STATES.get(word)
    if known is None:
        # A state of a newer Slurm: alive until it says otherwise.
        return JobStatus(JobState.RUNNING, f"Slurm state {word}")
    return JobStatus(known, "" if reason in ("None", "(null)") else reason)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""
