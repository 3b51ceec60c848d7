"""What Slurm says about our jobs, asked as seldom and as broadly as possible: submitit's watcher, without accounting.

One `squeue` for all jobs, at most every `poll_interval_s`; it also shows jobs that ended within MinJobAge (300 s by
default). Jobs it does not know are looked up in `sacct`, where accounting works (many sites have none; only an end is
believed, as accounting keeps jobs as running that nobody runs), then with `scontrol show job`, then in the exit file
that their batch script left. A job nobody knows is LOST, but only after a grace: controllers restart and lag. A failing
squeue changes nothing: no news is not bad news. Ids come again, so a row is about a job if its name and its time of
submission say so, too.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from submitit.slurm.slurm import SlurmInfoWatcher

from dflop.launch.answers import (
    SACCT_FORMAT,
    SQUEUE_FORMAT,
    Row,
    sacct_rows,
    scontrol_rows,
    squeue_rows,
    status_of,
    time_of_day,
)
from dflop.launch.commands import Command, last_line, run_command
from dflop.launch.job import JobHandle, JobState, JobStatus

BATCH_LOG, EXIT = "batch.log", "exit"
"""Suffixes of a job's files: what its batch script and srun say; the script's exit code, once it has ended."""
SACCT_RETRY_S = 600
SKEW_S = 600
"""By which the clock of the controller and ours may differ."""
REQUEUE_S = 60
"""A job that was submitted so much later than we know it may have been requeued, which sets that time anew."""
_UNKNOWN_ID = "Invalid job id"


class Watcher(SlurmInfoWatcher):
    """States of all jobs of a launcher, refreshed together; safe to share between threads.

    Args:
        poll_interval_s: Least time between two squeue calls; 30 s is what login nodes put up with.
        lost_after_s: How long a job may be unknown to everyone before it is LOST.
        command: Runs a client; replaced in tests.
        now: Seconds since the epoch; replaced in tests.
    """

    def __init__(
        self,
        *,
        poll_interval_s: float = 30.0,
        lost_after_s: float = 120.0,
        command: Command = run_command,
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(math.ceil(poll_interval_s))
        self.poll_interval_s = poll_interval_s
        self.lost_after_s = lost_after_s
        self._command, self._now = command, now
        self._lock = threading.RLock()
        self._jobs: dict[str, JobHandle] = {}
        """By id, those that are asked for; of two with one id, the later one."""
        self._statuses: dict[JobHandle, JobStatus] = {}
        self._submitted_at_s: dict[JobHandle, float] = {}
        """By the controller's clock, when last seen."""
        self._num_requeues: dict[JobHandle, int] = {}
        self._missing_since_s: dict[JobHandle, float] = {}
        self._sacct_retry_at_s = float("-inf")
        self._silent_since_s: float | None = None

    def submitted(self, handles: Iterable[JobHandle], reason: str = "submitted") -> None:
        """Watch jobs, of which it is known that they were accepted just now, so that nobody need be asked at once."""
        with self._lock:
            for handle in handles:
                known = self._jobs.get(handle.job_id)
                if known is None or known.submitted_at_s <= handle.submitted_at_s:
                    self._jobs[handle.job_id] = handle
                self._statuses[handle] = JobStatus(JobState.QUEUED, reason)

    def statuses(self, handles: Sequence[JobHandle]) -> list[JobStatus]:
        """Last known ones, at most `poll_interval_s` old; jobs from another process are asked for at once."""
        with self._lock:
            foreign = [handle for handle in handles if handle not in self._statuses]
            self.submitted(foreign, "not yet seen")
            if foreign or self._now() - self._last_status_check >= self.poll_interval_s:
                self.update()
            return [self._statuses[handle] for handle in handles]

    def forget(self, handles: Iterable[JobHandle]) -> None:
        """Ask no more about jobs whose end is known from elsewhere."""
        with self._lock:
            for handle in handles:
                if self._jobs.get(handle.job_id) == handle:
                    del self._jobs[handle.job_id]
                self._statuses.pop(handle, None)

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """The state of a job, in our words, for submitit's own classes."""
        with self._lock:
            self.update_if_long_enough(mode)
            return self._status_of_id(job_id).state.value.upper()

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Whether a job has ended, for submitit's own classes."""
        with self._lock:
            self.update_if_long_enough(mode)
            return self._status_of_id(job_id).state.is_final

    def register_job(self, job_id: str) -> None:
        """Nothing: a job is watched once its launcher knows it by its time of submission, too."""

    def update(self) -> None:
        """Ask about all jobs that have not ended."""
        live = [job for job in self._jobs.values() if not self._statuses[job].state.is_final]
        self._last_status_check = self._now()
        if not live:
            return
        rows, error = self._ask_squeue(live)
        if error:
            self._note_silence(live, error)
            return
        self._silent_since_s = None
        missing = self._match(live, rows)
        # Only accounting knows who cancelled a job.
        cancelled = [job for job in live if self._statuses[job] == (JobState.CANCELLED, "")]
        recorded = [row for row in self._ask_sacct([*missing, *cancelled]) if row.status.state.is_final]
        self._match(cancelled, recorded)
        missing = self._match(missing, recorded)
        missing = self._match(missing, self._ask_scontrol({_array_of(job) for job in missing}))
        arrays = {job_id.partition("_")[0] for row in rows for job_id in row.job_ids}
        for job in missing:
            self._statuses[job] = _status_of_exit(job) or self._unknown(job, arrays)

    def _status_of_id(self, job_id: str) -> JobStatus:
        job = self._jobs.get(job_id)
        return self._statuses[job] if job else JobStatus(JobState.QUEUED)

    def _match(self, jobs: Sequence[JobHandle], rows: Iterable[Row]) -> list[JobHandle]:
        """Notes what rows say about jobs; returns those that no row is about."""
        known = {job_id: row for row in rows for job_id in row.job_ids}
        missing = []
        for job in jobs:
            row = known.get(job.job_id)
            if row is None or not _is_about(row, job):
                missing.append(job)
            else:
                self._see(job, row)
        return missing

    def _see(self, job: JobHandle, row: Row) -> None:
        at_s = row.submitted_at_s
        if at_s is not None:
            if at_s > self._submitted_at_s.get(job, job.submitted_at_s + REQUEUE_S):
                said = [r.num_restarts for r in self._ask_scontrol({job.job_id}) if r.num_restarts is not None]
                self._num_requeues[job] = said[0] if said else self._num_requeues.get(job, 0) + 1
            self._submitted_at_s[job] = at_s
        self._missing_since_s.pop(job, None)
        self._statuses[job] = row.status
        num = self._num_requeues.get(job, 0)
        if num and not row.status.state.is_final:
            gist, _, rest = row.status.reason.partition("; ")
            reason = ", ".join(filter(None, [gist, f"requeued {'once' if num == 1 else f'{num} times'}"]))
            self._statuses[job] = JobStatus(row.status.state, reason + (f"; {rest}" if rest else ""))

    def _note_silence(self, jobs: Iterable[JobHandle], error: str) -> None:
        self._silent_since_s = self._silent_since_s or self._now()
        since = time_of_day(self._silent_since_s, self._now())
        for job in jobs:
            why = f"squeue has not answered since {since}: {error}"
            self._statuses[job] = JobStatus(self._statuses[job].state, why)

    def _unknown(self, job: JobHandle, arrays: set[str]) -> JobStatus:
        """Of a job that nobody knows: an element that is cancelled while it waits is forgotten at once."""
        before, now_s = self._statuses[job], self._now()
        has_started = before.state is not JobState.QUEUED or os.path.exists(job.path(BATCH_LOG))
        if "_" in job.job_id and _array_of(job) in arrays and not has_started:
            return JobStatus(JobState.CANCELLED, "while it waited")
        if now_s - self._missing_since_s.setdefault(job, now_s) >= self.lost_after_s:
            return JobStatus(JobState.LOST, "unknown to squeue, sacct and scontrol")
        return JobStatus(before.state, "Slurm does not know it; waiting before calling it lost")

    def _ask_squeue(self, jobs: Iterable[JobHandle]) -> tuple[list[Row], str]:
        """(rows, why there are none)."""
        done = self._command(["squeue", "-h", "-a", "-r", "-t", "all", "-o", SQUEUE_FORMAT, "-j", _ids(jobs)])
        # With one unknown id squeue fails, with several it exits 0 and says the same words.
        if done.returncode != 0 and _UNKNOWN_ID not in done.stderr:
            return [], last_line(done.stderr) or f"exit code {done.returncode}"
        return list(squeue_rows(done.stdout, self._now())), ""

    def _ask_sacct(self, jobs: Sequence[JobHandle]) -> list[Row]:
        if not jobs or self._now() < self._sacct_retry_at_s:
            return []
        done = self._command(["sacct", "-X", "-n", "-P", "-o", SACCT_FORMAT, "-j", _ids(jobs)])
        if done.returncode != 0:
            self._sacct_retry_at_s = self._now() + SACCT_RETRY_S
            return []
        return list(sacct_rows(done.stdout))

    def _ask_scontrol(self, job_ids: Iterable[str]) -> list[Row]:
        """Rows of jobs, or of arrays with all their elements."""
        answers = (self._command(["scontrol", "-o", "show", "job", job_id]) for job_id in sorted(job_ids))
        return [row for done in answers if done.returncode == 0 for row in scontrol_rows(done.stdout)]


def _is_about(row: Row, job: JobHandle) -> bool:
    """Whether a row with a job's id is about it: another one may have had the id before, or have it now."""
    is_old = row.submitted_at_s is not None and row.submitted_at_s < job.submitted_at_s - SKEW_S
    is_named = job.name.startswith(row.name) if "_" in job.job_id else row.name in ("", job.name)
    return is_named and not is_old


def _status_of_exit(job: JobHandle) -> JobStatus | None:
    code = (job.read(EXIT) or b"").strip()
    return status_of("FAILED" if int(code) else "COMPLETED", "") if code.isdigit() else None


def _array_of(job: JobHandle) -> str:
    return job.job_id.partition("_")[0]


def _ids(jobs: Iterable[JobHandle]) -> str:
    return ",".join(sorted({_array_of(job) for job in jobs}))
