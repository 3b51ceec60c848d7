"""What Slurm's clients print, as rows: which jobs, in which state and why, submitted when, under which name.

Elements of an array that wait share a line, `123_[4-7,9%2]`. Times are seconds since the epoch where the client knows
SLURM_TIME_FORMAT (`commands.py`), local time in ISO where it does not.
"""

from __future__ import annotations

import pwd
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from dflop.launch.job import JobState, JobStatus

SQUEUE_FORMAT = "%i|%T|%V|%S|%r|%j"
SACCT_FORMAT = "JobID,State,Submit,Reason,JobName"

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
_PLAIN = frozenset(
    {"PENDING", "RUNNING", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED"}
)
"""States that our own word says all of."""
_NO_NAME_YET = "allocation"
"""What sacct calls a job for the first seconds, until its database has heard of the name."""
_MAX_ELEMENT = 4_000_000
"""Slurm knows no higher index of an array (`MaxArraySize`)."""
_LAST_S = 253_402_300_799.0
"""The end of the year 9999: what a calendar can say."""
_SAYS_NOTHING = ("", "None", "(null)")


@dataclass(frozen=True, slots=True)
class Row:
    """A job, or elements of an array that are alike."""

    job_ids: tuple[str, ...]
    status: JobStatus
    submitted_at_s: float | None
    """By the controller's clock; of a requeued job, when that was. None: not said."""
    name: str
    """Empty: not said."""
    num_restarts: int | None = None
    """None: not said."""


def squeue_rows(text: str, now_s: float) -> Iterator[Row]:
    """Rows of `squeue -h -o SQUEUE_FORMAT`; `now_s` is the time."""
    for line in text.splitlines():
        fields = line.strip().split("|", 5)
        if len(fields) == 6:
            job_id, state, submitted, starts, reason, name = fields
            at_s = epoch_s(starts) if state == "PENDING" else None
            expected = f"; expected to start at {time_of_day(at_s, now_s)}" if at_s and at_s > now_s else ""
            yield Row(expand(job_id), status_of(state, reason, expected=expected), epoch_s(submitted), name)


def sacct_rows(text: str) -> Iterator[Row]:
    """Rows of `sacct -X -n -P -o SACCT_FORMAT`."""
    for line in text.splitlines():
        fields = line.strip().split("|", 4)
        if len(fields) == 5:
            job_id, state, submitted, reason, name = fields
            name = "" if name == _NO_NAME_YET else name
            yield Row(expand(job_id), status_of(state, reason), epoch_s(submitted), name)


def scontrol_rows(text: str) -> Iterator[Row]:
    """Rows of `scontrol -o show job`."""
    for line in text.splitlines():
        found = {key: _field(line, key) for key in ("JobId", "ArrayJobId", "ArrayTaskId", "JobState", "Reason")}
        if not found["JobId"] or not found["JobState"]:
            continue
        elements = found["ArrayTaskId"]
        is_one = elements.isdecimal()
        job_id = found["JobId"]
        if elements:
            job_id = f"{found['ArrayJobId']}_{elements if is_one else f'[{elements}]'}"
        name = re.search(r"\bJobName=(.*?)(?: UserId=|$)", line)
        restarts = _field(line, "Restarts")
        yield Row(
            expand(job_id),
            status_of(found["JobState"], found["Reason"]),
            epoch_s(_field(line, "SubmitTime")),
            name[1] if name else "",
            int(restarts) if re.fullmatch(r"\d{1,9}", restarts, re.ASCII) else None,
        )


def expand(job_id: str) -> tuple[str, ...]:
    """`123_[4-6,9%2] -> 123_4, 123_5, 123_6, 123_9`; an array of which nothing waits any more is itself."""
    match = re.fullmatch(r"(\d+)_\[([^\]%]*)(?:%\d+)?\]", job_id)
    if match is None:
        return (job_id,)
    base, found = match[1], list[str]()
    for part in filter(None, match[2].split(",")):
        numbers = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7})(?::([1-9]\d{0,6}))?)?", part, re.ASCII)
        if numbers is not None:
            first, last = int(numbers[1]), int(numbers[2] or numbers[1])
            found += [
                f"{base}_{element}" for element in range(first, min(last, _MAX_ELEMENT) + 1, int(numbers[3] or 1))
            ]
    return tuple(found) or (base,)


def array_of(job_id: str) -> str:
    """Id of the array that an element belongs to; of any other job its own."""
    return job_id.partition("_")[0]


def status_of(slurm_state: str, reason: str, *, expected: str = "") -> JobStatus:
    """Our word for Slurm's state, and what else Slurm says.

    Args:
        slurm_state: As a client prints it; sacct says `CANCELLED by 1000`.
        reason: The client's; `None` and the like say nothing.
        expected: Added to a reason.
    """
    word, _, by = slurm_state.strip().partition(" ")
    known = STATES.get(word)
    if known is None:
        # A state of a newer Slurm: alive until it says otherwise.
        return JobStatus(JobState.RUNNING, f"Slurm state {word}")
    parts = [] if word in _PLAIN else [word.lower().replace("_", " ")]
    if by.startswith("by "):
        parts.append(f"by {_user(by[3:])}")
    if reason not in _SAYS_NOTHING:
        parts.append(reason)
    if expected and not parts:
        parts.append("waits")
    return JobStatus(known, ", ".join(parts) + expected)


def epoch_s(text: str) -> float | None:
    """Seconds since the epoch of a time; None for `N/A` and whatever else is none."""
    if re.fullmatch(r"\d+", text, re.ASCII):
        return min(float(text), _LAST_S) or None
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None


def time_of_day(at_s: float, now_s: float) -> str:
    """`14:05`, with the day where that is not today's."""
    at = time.localtime(at_s)
    return time.strftime("%H:%M" if at[:3] == time.localtime(now_s)[:3] else "%d %b %H:%M", at)


def _field(line: str, key: str) -> str:
    match = re.search(rf"(?:^|\s){key}=(\S*)", line)
    return match[1] if match else ""


def _user(uid: str) -> str:
    try:
        return pwd.getpwuid(int(uid)).pw_name
    except (KeyError, ValueError, OverflowError):
        return f"user {uid[:20]}"
