"""What Slurm says about our jobs, asked as seldom and as broadly as possible; submitit's watcher needs accounting.

One `squeue` for all jobs, at most every `poll_interval_s`; it also shows jobs that ended within MinJobAge (300 s by
default). Jobs it does not know are looked up in `sacct`, where accounting works (only an end is believed, as accounting
keeps jobs as running that nobody runs), then in the exit file that their batch script left. A job nobody knows is LOST,
but only after a grace: controllers restart and lag. A failing squeue changes nothing: no news is not bad news. Ids come
again, and people and plugins rename jobs, so a row is about a job if it runs the job's script, whose path is of one
submission and cannot be changed, or, where a site submits a copy, if its time of submission fits.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from dflop.config.slurm_refusals import refusal
from dflop.files import user_name
from dflop.launch.commands import Command, last_line, on_cluster, run_command
from dflop.launch.job import JobHandle, JobState, JobStatus
from dflop.launch.results import BATCH_LOG

EXIT = "exit"
"""Suffix of a job's file: the exit code of its batch script, once that has ended."""
SQUEUE_FORMAT = "RestartCnt:|,JobArrayID:|,State:|,SubmitTime:|,StartTime:|,NodeList:|,Reason:|,Command:|"
SACCT_FORMAT = "JobID,State,Submit,Start,NodeList,Reason,SubmitLine"
SACCT_RETRY_S = 600
SKEW_S = 1200
"""By which the clock of the controller and ours may differ, with the time that sbatch may take."""
NEVER = "it will never start"
ON_NODES = " on "
"""Between the reason of a failure and the nodes it happened on."""
_WORDS = {
    JobState.QUEUED: "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT",
    JobState.RUNNING: "RUNNING COMPLETING RESIZING SIGNALING STAGE_OUT STOPPED SUSPENDED",
    JobState.DONE: "COMPLETED",
    JobState.FAILED: "FAILED",
    JobState.CANCELLED: "CANCELLED REVOKED",
    JobState.TIMEOUT: "TIMEOUT DEADLINE",
    JobState.OOM: "OUT_OF_MEMORY",
    JobState.NODE_FAIL: "NODE_FAIL BOOT_FAIL",
    JobState.PREEMPTED: "PREEMPTED",
}
"""Slurm's words for each state. A reason repeats the word unless it is the first one."""
STATES = {word: state for state, words in _WORDS.items() for word in words.split()}
"""Every job state of `man squeue`."""
_SAYS_NOTHING = ("", "None", "(null)", "None assigned")
_MAX_ELEMENT, _LAST_S = 4_000_000, 253_402_300_799.0
"""Slurm knows no higher index of an array (`MaxArraySize`); the end of the year 9999: what a calendar can say."""


class Watcher:
    """States of all jobs of a launcher, refreshed together; safe to share between threads.

    Between two squeue calls are at least `poll_interval_s`; 30 s is what login nodes put up with. A job is LOST when
    nobody has known it for `lost_after_s`. The command that asks and the clock are replaced in tests.
    """

    def __init__(
        self, *, poll_interval_s: float = 30.0, lost_after_s: float = 120.0, command: Command = run_command,
        now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.poll_interval_s, self.lost_after_s, self._command, self._now = poll_interval_s, lost_after_s, command, now
        self._lock, self._asked_at_s = threading.RLock(), float("-inf")
        self._jobs: dict[tuple[str, str], JobHandle] = {}
        """By cluster and number, those that are asked for; of two alike, the later one."""
        self._statuses: dict[JobHandle, JobStatus] = {}
        self._missing_since_s: dict[JobHandle, float] = {}
        self._sacct_retry_at_s = float("-inf")
        self._silent_since_s: float | None = None

    def note(self, handles: Iterable[JobHandle], state: JobState = JobState.QUEUED, reason: str = "submitted") -> None:
        """Watch jobs of which something is known, so that nobody need be asked now, or ever if they have ended."""
        with self._lock:
            for handle in handles:
                known = self._jobs.get(handle.id[:2])
                if known is None or known.submitted_at_s <= handle.submitted_at_s:
                    self._jobs[handle.id[:2]] = handle
                self._statuses[handle] = JobStatus(state, reason)

    def statuses(self, handles: Sequence[JobHandle]) -> list[JobStatus]:
        """Last known ones, at most `poll_interval_s` old; jobs from another process are asked for at once."""
        with self._lock:
            foreign = [handle for handle in handles if handle not in self._statuses]
            self.note(foreign, reason="not yet seen")
            if foreign or self._now() - self._asked_at_s >= self.poll_interval_s:
                self._ask()
            return [self._statuses[handle] for handle in handles]

    def not_anothers(self, handles: Sequence[JobHandle]) -> list[JobHandle]:
        """Handles whose id is not another job's by now; squeue is asked about jobs this process has not followed."""
        unsure = [job for job in handles if job not in self._statuses or job in self._missing_since_s]
        others = set[JobHandle]()
        for jobs in by_cluster(unsure).values():
            rows = _by_id(read_rows(self._squeue(jobs).stdout, self._now()))
            others |= {job for job in jobs if job.job_id in rows and not rows[job.job_id].is_about(job)}
        return [job for job in handles if job not in others]

    def _squeue(self, jobs: Sequence[JobHandle]) -> subprocess.CompletedProcess[str]:
        command = ["squeue", *on_cluster(jobs[0].cluster), "-h", "-a", "-r", "-t", "all", "-O", SQUEUE_FORMAT, "-j"]
        return self._command([*command, _ids(jobs)])

    def _ask(self) -> None:
        """About all jobs that have not ended."""
        live = [job for job in self._jobs.values() if not self._statuses[job].state.is_final]
        self._asked_at_s = self._now()
        for jobs in by_cluster(live).values():
            self._ask_cluster(jobs)

    def _ask_cluster(self, live: Sequence[JobHandle]) -> None:
        done, now_s = self._squeue(live), self._now()
        # With one unknown id squeue fails, with several it exits 0 and says the same words.
        if done.returncode != 0 and "Invalid job id" not in done.stderr:
            self._silent_since_s = self._silent_since_s or now_s
            error = last_line(done.stderr) or f"exit code {done.returncode}"
            why = f"squeue has not responded since {time_of_day(self._silent_since_s, now_s)}: {error}"
            self._statuses |= {job: JobStatus(self._statuses[job].state, why) for job in live}
            return
        self._silent_since_s, rows = None, list(read_rows(done.stdout, now_s))
        missing = self._match(live, rows)
        # Only accounting knows who cancelled a job.
        cancelled = [job for job in live if self._statuses[job] == (JobState.CANCELLED, "")]
        recorded = [row for row in self._ask_sacct([*missing, *cancelled]) if row.status.state.is_final]
        self._match(cancelled, recorded)
        arrays = {job_id.partition("_")[0] for row in rows for job_id in row.job_ids}
        for job in self._match(missing, recorded):
            code = (job.read(EXIT) or b"").strip()
            ended = JobStatus(JobState.DONE if code == b"0" else JobState.FAILED)
            self._statuses[job] = ended if code.isdigit() else self._unknown(job, arrays)

    def _match(self, jobs: Sequence[JobHandle], rows: Iterable[Row]) -> list[JobHandle]:
        """Notes what rows say about jobs; returns those that no row is about."""
        known = _by_id(rows)
        about = {job: row for job in jobs if (row := known.get(job.job_id)) is not None and row.is_about(job)}
        for job, row in about.items():
            self._missing_since_s.pop(job, None)
            self._statuses[job] = row.status
        return [job for job in jobs if job not in about]

    def _unknown(self, job: JobHandle, arrays: set[str]) -> JobStatus:
        """State of a job that Slurm no longer knows: it forgets an array element cancelled while waiting at once."""
        before, now_s = self._statuses[job], self._now()
        has_started = before.state is not JobState.QUEUED or os.path.exists(job.path(BATCH_LOG))
        array, is_element, _ = job.job_id.partition("_")
        if is_element and array in arrays and not has_started:
            return JobStatus(JobState.CANCELLED, "while it waited")
        if now_s - self._missing_since_s.setdefault(job, now_s) >= self.lost_after_s:
            return JobStatus(JobState.LOST, "unknown to squeue and sacct")
        return JobStatus(before.state, "unknown to Slurm; waiting before counting it as lost")

    def _ask_sacct(self, jobs: Sequence[JobHandle]) -> Iterator[Row]:
        if not jobs or self._now() < self._sacct_retry_at_s:
            return
        command = ["sacct", *on_cluster(jobs[0].cluster), "-X", "-n", "-P", "-o", SACCT_FORMAT, "-j", _ids(jobs)]
        done = self._command(command)
        if done.returncode == 0:
            # It does not say how often a job was requeued, which is of no interest once it has ended.
            yield from read_rows(re.sub("^", "|", done.stdout, flags=re.MULTILINE), self._now())
        else:
            self._sacct_retry_at_s = self._now() + SACCT_RETRY_S


class Row(NamedTuple):
    """What a client says of a job, or of elements of an array that are alike."""

    job_ids: tuple[str, ...]
    status: JobStatus
    submitted_at_s: float | None
    """By the controller's clock; of a requeued job, when that was. None: not said."""
    script: str
    """Path of its batch script, or (sacct) the command that submitted it; empty: not said."""
    is_first_start: bool

    def is_about(self, job: JobHandle) -> bool:
        """Whether it is about a job whose id it has: another one may have had the id before, or have it now."""
        if self.script.endswith(job.script) or self.submitted_at_s is None:
            return True
        later_s = self.submitted_at_s - job.submitted_at_s
        return later_s >= -SKEW_S and (later_s <= SKEW_S or not self.is_first_start)


def read_rows(text: str, now_s: float) -> Iterator[Row]:
    """Rows of `squeue -h -O SQUEUE_FORMAT`, or as of sacct behind a bar; `now_s` is the time."""
    for line in text.splitlines():
        fields = line.strip().split("|", 7)
        if len(fields) == 8:
            restarts, job_id, state, submitted, starts, nodes, reason, script = fields
            more = f", requeued {'once' if restarts == '1' else f'{restarts} times'}" if restarts.strip("0") else ""
            at_s = epoch_s(starts) if state == "PENDING" else None
            more += f"; expected to start at {time_of_day(at_s, now_s)}" if at_s and at_s > now_s else ""
            status, script = status_of(state, reason, nodes, more), script.removesuffix("|")
            yield Row(expand(job_id), status, epoch_s(submitted), script, restarts == "0")


def expand(job_id: str) -> tuple[str, ...]:
    """`123_[4-6,9%2] -> 123_4, 123_5, 123_6, 123_9`; an array of which nothing waits any more is itself."""
    match = re.fullmatch(r"(\d+)_\[([^\]%]*)(?:%\d+)?\]", job_id)
    if match is None:
        return (job_id,)
    found = list[str]()
    for part in match[2].split(","):
        numbers = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7})(?::([1-9]\d{0,6}))?)?", part, re.ASCII)
        if numbers is not None:
            last = min(int(numbers[2] or numbers[1]), _MAX_ELEMENT)
            found += [f"{match[1]}_{n}" for n in range(int(numbers[1]), last + 1, int(numbers[3] or 1))]
    return tuple(found) or (match[1],)


def status_of(slurm_state: str, reason: str, nodes: str = "", more: str = "") -> JobStatus:
    """Our state for Slurm's (sacct reports `CANCELLED by 1000`), with details; `more` is for live jobs."""
    word, _, by = slurm_state.strip().partition(" ")
    known = STATES.get(word)
    if known is None:  # of a newer Slurm: alive until it says otherwise
        return JobStatus(JobState.RUNNING, f"Slurm state {word}")
    parts = [] if _WORDS[known].split()[0] == word else [word.lower().replace("_", " ")]
    if uid := re.fullmatch(r"by (\d{1,20})", by, re.ASCII):
        parts.append(f"by {user_name(int(uid[1]))}")
    if reason not in _SAYS_NOTHING:
        parts.append(reason)
    if known is JobState.QUEUED and (why := refusal(reason)) and why.is_for_ever:
        return JobStatus(known, f"{', '.join(parts)}: {NEVER}, {why}")
    if known in (JobState.FAILED, JobState.NODE_FAIL) and nodes not in _SAYS_NOTHING:
        parts[-1:] = [f"{parts[-1] if parts else word}{ON_NODES}{nodes}"]
    if known.is_final:
        return JobStatus(known, ", ".join(parts))
    said = ", ".join(parts or ["waits"] * more.startswith(";")) + more
    return JobStatus(known, said.removeprefix(", "))


def epoch_s(text: str) -> float | None:
    """Seconds since the epoch, of these or of local time in ISO (a client that does not know SLURM_TIME_FORMAT)."""
    if re.fullmatch(r"\d+", text, re.ASCII):
        return min(float(text), _LAST_S) or None
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):  # `N/A`
        return None


def time_of_day(at_s: float, now_s: float) -> str:
    """`14:05`, with the day where that is not today's."""
    at = time.localtime(at_s)
    return time.strftime("%H:%M" if at[:3] == time.localtime(now_s)[:3] else "%d %b %H:%M", at)


def _by_id(rows: Iterable[Row]) -> dict[str, Row]:
    return {job_id: row for row in rows for job_id in row.job_ids}


def by_cluster(jobs: Iterable[JobHandle]) -> dict[str, list[JobHandle]]:
    """Jobs by the Slurm cluster that accepted them."""
    found: dict[str, list[JobHandle]] = {}
    for job in jobs:
        found.setdefault(job.cluster, []).append(job)
    return found


def _ids(jobs: Iterable[JobHandle]) -> str:
    return ",".join(sorted({job.job_id.partition("_")[0] for job in jobs}))
