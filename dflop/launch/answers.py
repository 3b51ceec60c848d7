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

SQUEUE_FORMAT = "%i|%T|%V|%S|%N|%r|%j"
SACCT_FORMAT = "JobID,State,Submit,NodeList,Reason,JobName"

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
STATES = {word: state for state, words in _WORDS.items() for word in words.split()}
"""Every job state of `man squeue`. submitit takes SUSPENDED, CONFIGURING and REQUEUE_HOLD for ended."""
_PLAIN = {words.split()[0] for words in _WORDS.values()}
"""States that our own word says all of."""
_LESS = "ask for less, or for another partition"
NEVER = {
    "PartitionTimeLimit": "its time limit is above the partition's: lower cluster.slurm.time_limit_min",
    "PartitionNodeLimit": "it wants more nodes than the partition gives to one job: ask for fewer, or for another",
    "BadConstraints": f"no node has all that it asks for: {_LESS}",
    "MaxMemPerLimit": f"it wants more memory than one job may have: {_LESS}",
    "AccountNotAllowed": "its account may not use the partition: see cluster.slurm.account",
    "InvalidAccount": "Slurm knows no such account: see cluster.slurm.account",
    "InvalidQOS": "Slurm knows no such QOS: see cluster.slurm.qos",
    "QOSNotAllowed": "its QOS may not use the partition: see cluster.slurm.qos",
    "QOSMinGRES": "its QOS wants more GPUs of every job: see cluster.slurm.qos",
    "DependencyNeverSatisfied": "the job that it waits for has failed: cancel it",
    "launch failed requeued held": "its launch failed and it is held: see that its nodes see its folder, then "
    "`scontrol release` it",
    "launch_failed_requeued_held": "its launch failed and it is held: see that its nodes see its folder, then "
    "`scontrol release` it",
}
"""Reasons for which a job waits for ever, and what to do; besides these, limits of a QOS or an account on one job."""
_KEYS_OF_REFUSALS = (
    ("mutually exclusive", "cluster.slurm.ask_for_memory: false, where the site wants memory by CPU or GPU"),
    ("memory", "cluster.memory_per_process_gib, or cluster.slurm.ask_for_memory: false"),
    ("account", "cluster.slurm.account"),
    ("partition", "cluster.slurm.partition"),
    ("qos", "cluster.slurm.qos"),
    ("feature", "cluster.slurm.constraint"),
    ("generic resource", "cluster.slurm.gpus, cluster.slurm.gpu_type"),
    ("time limit", "cluster.slurm.time_limit_min"),
    ("node configuration", "cluster.num_nodes, cluster.num_processes_per_node"),
)
"""(In sbatch's words, what to look at) where it refuses a job."""
_PER_JOB = re.compile(r"(QOS|Assoc)Max\w+Per(Job|Node)\w*")
ON_NODES = " on "
"""Between the reason of a failure and the nodes it happened on."""
_NO_NAME_YET = "allocation"
"""What sacct calls a job for the first seconds, until its database has heard of the name."""
_MAX_ELEMENT = 4_000_000
"""Slurm knows no higher index of an array (`MaxArraySize`)."""
_LAST_S = 253_402_300_799.0
"""The end of the year 9999: what a calendar can say."""
_SAYS_NOTHING = ("", "None", "(null)", "None assigned")


@dataclass(frozen=True, slots=True)
class Row:
    """A job, or elements of an array that are alike."""

    job_ids: tuple[str, ...]
    status: JobStatus
    submitted_at_s: float | None
    """By the controller's clock; of a requeued job, when that was. None: not said."""
    name: str
    """Empty: not said."""
    nodes: str = ""
    """That it has or had, as Slurm writes them; empty: not said."""
    num_restarts: int | None = None
    """None: not said."""


def keys_of_refusal(said: str) -> str:
    """Keys of the configuration to look at when sbatch refuses a job in these words."""
    return next((keys for words, keys in _KEYS_OF_REFUSALS if words in said.lower()), "the cluster section")


def squeue_rows(text: str, now_s: float) -> Iterator[Row]:
    """Rows of `squeue -h -o SQUEUE_FORMAT`; `now_s` is the time."""
    for line in text.splitlines():
        fields = line.strip().split("|", 6)
        if len(fields) == 7:
            job_id, state, submitted, starts, nodes, reason, name = fields
            at_s = epoch_s(starts) if state == "PENDING" else None
            expected = f"; expected to start at {time_of_day(at_s, now_s)}" if at_s and at_s > now_s else ""
            yield Row(expand(job_id), status_of(state, reason, nodes, expected), epoch_s(submitted), name, nodes)


def sacct_rows(text: str) -> Iterator[Row]:
    """Rows of `sacct -X -n -P -o SACCT_FORMAT`."""
    for line in text.splitlines():
        fields = line.strip().split("|", 5)
        if len(fields) == 6:
            job_id, state, submitted, nodes, reason, name = fields
            name = "" if name == _NO_NAME_YET else name
            yield Row(expand(job_id), status_of(state, reason, nodes), epoch_s(submitted), name, nodes)


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
        restarts, nodes = _field(line, "Restarts"), _field(line, "NodeList")
        yield Row(
            expand(job_id),
            status_of(found["JobState"], found["Reason"], nodes),
            epoch_s(_field(line, "SubmitTime")),
            name[1] if name else "",
            nodes,
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


def status_of(slurm_state: str, reason: str, nodes: str = "", expected: str = "") -> JobStatus:
    """Our word for Slurm's state, and what else Slurm says.

    Args:
        slurm_state: As a client prints it; sacct says `CANCELLED by 1000`.
        reason: The client's; `None` and the like say nothing.
        nodes: Told of a job that failed.
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
    if known is JobState.QUEUED and (reason in NEVER or _PER_JOB.fullmatch(reason)):
        why = NEVER.get(reason, f"its account or QOS does not let one job have that much: {_LESS}")
        return JobStatus(known, f"{', '.join(parts)}: it will never start, {why}")
    if known in (JobState.FAILED, JobState.NODE_FAIL) and nodes not in _SAYS_NOTHING:
        parts[-1:] = [f"{parts[-1] if parts else word}{ON_NODES}{nodes}"]
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
