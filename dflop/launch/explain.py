"""Why a Slurm job ended as it did, in the words of its tasks, of srun and of its batch script: Slurm's are fewer."""

from __future__ import annotations

import re
from typing import NamedTuple

from dflop.errors import Interrupted
from dflop.launch.answers import ON_NODES
from dflop.launch.executor import INTERRUPTED
from dflop.launch.job import CHECKPOINTED, JobHandle, JobState, JobStatus
from dflop.launch.marks import START_LINE
from dflop.launch.results import first_error, read_results, status_from_results
from dflop.launch.watcher import BATCH_LOG

_STOPPED = f"Exited with exit code {Interrupted.exit_code}"
_TOLD = "User defined signal 2"
"""How srun calls the end of a task that was told before it could make the signal wait: within its first millisecond."""
_DEAD_TASK = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,-]+)[^:]*: (?P<how>.+)")


class DeadTask(NamedTuple):
    """A task that srun complained about."""

    rank: int
    how: str
    """It ended: `died (signal 9)`, `Exited with exit code 1`."""
    reason: str
    """The same, with rank and node."""

    @property
    def was_killed(self) -> bool:
        """By a signal."""
        return not self.how.startswith("Exited")


def first_dead_task(handle: JobHandle) -> DeadTask | None:
    """The first one since the job was started last."""
    match = _DEAD_TASK.search(_said_since_start(handle))
    if match is None:
        return None
    rank = int(re.split(r"[,-]", match["tasks"])[0])
    how = {"Killed": "died (signal 9)", "Terminated": "died (signal 15)"}.get(match["how"], match["how"])
    return DeadTask(rank, how, f"rank {rank} {how} on {match['node']}")


def explain(handle: JobHandle, status: JobStatus) -> JobStatus:
    """What is better known than by Slurm about a job that has ended, other than well or by somebody's order."""
    if status.state not in (JobState.FAILED, JobState.OOM, JobState.LOST):
        return status
    if (why := _read(handle, INTERRUPTED)) is not None:
        return JobStatus(JobState.INTERRUPTED, f"{CHECKPOINTED}; {why.strip()}".removesuffix("; "))
    dead = first_dead_task(handle)
    if status.state is JobState.OOM:
        return JobStatus(JobState.OOM, dead.reason) if dead else status
    if dead is not None and dead.how == _TOLD:
        return JobStatus(JobState.INTERRUPTED, f"{CHECKPOINTED}; it was stopped before it listened")
    if dead is not None and dead.was_killed:
        return JobStatus(JobState.FAILED, dead.reason)
    if first_error(read_results(handle)) is not None:
        return status_from_results(handle)
    if dead is not None and _STOPPED in dead.reason:
        return JobStatus(JobState.INTERRUPTED, CHECKPOINTED)
    if dead is not None:
        return JobStatus(status.state, dead.reason)
    if status.state is not JobState.FAILED:
        return status
    # The tasks never began: a line of the script has something to say.
    if text := _said_since_start(handle):
        said = [line for line in text.splitlines() if line.strip() and not line.startswith(START_LINE)]
        return JobStatus(status.state, said[-1]) if said else status
    _, on, nodes = status.reason.rpartition(ON_NODES)
    why = f"it ended before its script began{on}{nodes}: can {nodes if on else 'its node'} see {handle.folder}?"
    return JobStatus(status.state, f"{status.reason}; {why}" if status.reason else why)


def _said_since_start(handle: JobHandle) -> str:
    text = _read(handle, BATCH_LOG) or ""
    return text[max(0, text.rfind(START_LINE)) :]


def _read(handle: JobHandle, suffix: str) -> str | None:
    content = handle.read(suffix)
    return None if content is None else content.decode(errors="replace")
