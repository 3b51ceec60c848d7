"""What Slurm says about our jobs, asked as seldom and as broadly as possible.

One `squeue` for all jobs, at most every `poll_interval_s`; it also shows jobs that ended within MinJobAge (300 s by
default). Jobs it does not know are looked up in `sacct`, where accounting works (many sites have none; only an end is
believed, as accounting keeps jobs as running that nobody runs), then with `scontrol show job`. A job nobody knows is
LOST, but only after a grace: controllers restart and lag. A failing squeue changes nothing: no news is not bad news.
Ids come again (a new controller starts at 1), so a job is known by id and time of submission together.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dflop.launch.answers import (
    SACCT_FORMAT,
    SQUEUE_FORMAT,
    Row,
    array_of,
    sacct_rows,
    scontrol_rows,
    squeue_rows,
    time_of_day,
)
from dflop.launch.commands import Command, last_line, run_command
from dflop.launch.job import JobHandle, JobState, JobStatus
from dflop.launch.script import BATCH_LOG

SACCT_RETRY_S = 600
SKEW_S = 600
"""By which the clock of the controller and ours may differ."""
REQUEUE_S = 60
"""A job that was submitted so much later than we know it may have been requeued, which sets that time anew."""
_NO_NEWS = "Invalid job id"


@dataclass(slots=True)
class _Watched:
    handle: JobHandle
    status: JobStatus
    submitted_at_s: float | None = None
    """By the controller's clock, when last seen."""
    num_requeues: int = 0
    missing_since_s: float | None = None

    def is_meant_by(self, row: Row) -> bool:
        """Whether a row with our id is about our job: another one may have had the id before, or have it now."""
        is_old = row.submitted_at_s is not None and row.submitted_at_s < self.handle.submitted_at_s - SKEW_S
        is_element = array_of(self.handle.job_id) != self.handle.job_id
        named = self.handle.name.startswith(row.name) if is_element else row.name in ("", self.handle.name)
        return named and not is_old

    def may_be_requeued(self, row: Row) -> bool:
        if row.submitted_at_s is None:
            return False
        if self.submitted_at_s is None:
            return row.submitted_at_s > self.handle.submitted_at_s + REQUEUE_S
        return row.submitted_at_s > self.submitted_at_s


class SlurmWatcher:
    """Statuses of all registered jobs, refreshed together; safe to share between threads.

    Args:
        poll_interval_s: Least time between two squeue calls; 30 s is what login nodes put up with.
        lost_after_s: How long a job may be unknown to everyone before it is LOST.
        command: Runs a client; replaced in tests.
        clock: Monotonic seconds; replaced in tests.
        now: Seconds since the epoch; replaced in tests.
    """

    def __init__(
        self,
        *,
        poll_interval_s: float = 30.0,
        lost_after_s: float = 120.0,
        command: Command = run_command,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.poll_interval_s = poll_interval_s
        self.lost_after_s = lost_after_s
        self._command, self._clock, self._now = command, clock, now
        self._lock = threading.Lock()
        self._jobs: dict[tuple[str, float], _Watched] = {}
        self._refreshed_at_s = float("-inf")
        self._sacct_retry_at_s = float("-inf")
        self._silent_since_s: float | None = None

    def submitted(self, handles: Iterable[JobHandle]) -> None:
        """Watch jobs that were accepted just now, so that nobody need be asked about them at once."""
        with self._lock:
            for handle in handles:
                self._jobs[_key(handle)] = _Watched(handle, JobStatus(JobState.QUEUED, "submitted"))

    def forget(self, handles: Iterable[JobHandle]) -> None:
        """Ask no more about jobs whose end is known from elsewhere."""
        with self._lock:
            for handle in handles:
                self._jobs.pop(_key(handle), None)

    def statuses(self, handles: Sequence[JobHandle]) -> list[JobStatus]:
        """Last known ones, at most `poll_interval_s` old; jobs from another process are asked for at once."""
        with self._lock:
            foreign = [handle for handle in handles if _key(handle) not in self._jobs]
            for handle in foreign:
                self._jobs[_key(handle)] = _Watched(handle, JobStatus(JobState.QUEUED, "not yet seen"))
            if foreign or self._clock() - self._refreshed_at_s >= self.poll_interval_s:
                self._refresh()
            return [self._jobs[_key(handle)].status for handle in handles]

    def _refresh(self) -> None:
        live = [job for job in self._jobs.values() if not job.status.state.is_final]
        self._refreshed_at_s = self._clock()
        if not live:
            return
        rows, error = self._ask_squeue(live)
        if error:
            self._note_silence(live, error)
            return
        self._silent_since_s = None
        missing = self._match(live, rows)
        # Only accounting knows who cancelled a job.
        cancelled = [job for job in live if job.status == (JobState.CANCELLED, "")]
        recorded = [row for row in self._ask_sacct([*missing, *cancelled]) if row.status.state.is_final]
        self._match(cancelled, recorded)
        missing = self._match(missing, recorded)
        missing = self._match(missing, self._ask_scontrol({array_of(job.handle.job_id) for job in missing}))
        arrays = {array_of(job_id) for row in rows for job_id in row.job_ids}
        for job in missing:
            self._settle(job, arrays)

    def _match(self, jobs: Sequence[_Watched], rows: Iterable[Row]) -> list[_Watched]:
        """Notes what rows say about jobs; returns those that no row is about."""
        known = {job_id: row for row in rows for job_id in row.job_ids}
        missing = []
        for job in jobs:
            row = known.get(job.handle.job_id)
            if row is None or not job.is_meant_by(row):
                missing.append(job)
            else:
                self._see(job, row)
        return missing

    def _see(self, job: _Watched, row: Row) -> None:
        if job.may_be_requeued(row):
            restarts = [r.num_restarts for r in self._ask_scontrol({job.handle.job_id})]
            job.num_requeues = next((n for n in restarts if n is not None), job.num_requeues + 1)
        job.submitted_at_s, job.missing_since_s = row.submitted_at_s or job.submitted_at_s, None
        job.status = row.status
        if job.num_requeues and not row.status.state.is_final:
            times = "once" if job.num_requeues == 1 else f"{job.num_requeues} times"
            gist, _, rest = row.status.reason.partition("; ")
            reason = ", ".join(filter(None, [gist, f"requeued {times}"])) + (f"; {rest}" if rest else "")
            job.status = JobStatus(row.status.state, reason)

    def _note_silence(self, jobs: Iterable[_Watched], error: str) -> None:
        now_s = self._now()
        if self._silent_since_s is None:
            self._silent_since_s = now_s
        since = time_of_day(self._silent_since_s, now_s)
        for job in jobs:
            job.status = JobStatus(job.status.state, f"squeue has not answered since {since}: {error}")

    def _settle(self, job: _Watched, arrays: set[str]) -> None:
        """What becomes of a job that nobody knows: an element that is cancelled while it waits is forgotten at once."""
        job_id = job.handle.job_id
        is_known_array = array_of(job_id) != job_id and array_of(job_id) in arrays
        has_started = job.status.state is not JobState.QUEUED or os.path.exists(job.handle.path(BATCH_LOG))
        if is_known_array and not has_started:
            job.status = JobStatus(JobState.CANCELLED, "while it waited")
            return
        now = self._clock()
        job.missing_since_s = now if job.missing_since_s is None else job.missing_since_s
        if now - job.missing_since_s >= self.lost_after_s:
            job.status = JobStatus(JobState.LOST, "unknown to squeue, sacct and scontrol")
        else:
            job.status = job.status._replace(reason="Slurm does not know it; waiting before calling it lost")

    def _ask_squeue(self, jobs: Iterable[_Watched]) -> tuple[list[Row], str]:
        """(rows, why there are none)."""
        ids = ",".join(sorted({array_of(job.handle.job_id) for job in jobs}))
        done = self._command(["squeue", "-h", "-a", "-r", "-t", "all", "-o", SQUEUE_FORMAT, "-j", ids])
        # With one unknown id squeue fails, with several it exits 0 and says the same words.
        if done.returncode != 0 and _NO_NEWS not in done.stderr:
            return [], last_line(done.stderr) or f"exit code {done.returncode}"
        return list(squeue_rows(done.stdout, self._now())), ""

    def _ask_sacct(self, jobs: Sequence[_Watched]) -> list[Row]:
        if not jobs or self._clock() < self._sacct_retry_at_s:
            return []
        ids = ",".join(sorted({array_of(job.handle.job_id) for job in jobs}))
        done = self._command(["sacct", "-X", "-n", "-P", "-o", SACCT_FORMAT, "-j", ids])
        if done.returncode != 0:
            self._sacct_retry_at_s = self._clock() + SACCT_RETRY_S
            return []
        return list(sacct_rows(done.stdout))

    def _ask_scontrol(self, job_ids: Iterable[str]) -> list[Row]:
        """Rows of jobs, or of arrays with all their elements."""
        answers = (self._command(["scontrol", "-o", "show", "job", job_id]) for job_id in sorted(job_ids))
        return [row for done in answers if done.returncode == 0 for row in scontrol_rows(done.stdout)]


def _key(handle: JobHandle) -> tuple[str, float]:
    return handle.job_id, handle.submitted_at_s
