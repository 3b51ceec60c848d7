"""A job as a value: what to run, on what, how to find it again, and what became of it; and what a launcher can do.

A payload is named, never shipped: `entry` is `module:function` and `args` are strings. A `JobHandle` is all that
another process needs to watch, cancel or collect the job; the rest lies in its folder, under submitit's names. Numbers
come again (a Slurm controller that lost its state counts from 1) and names change, so a job is its `JobId`, and each
submission to Slurm has a folder that no other one writes to: clocks of nodes decide nothing.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from dflop.errors import LaunchError

CHECKPOINTED = "its state is on disk"
"""Why a job is INTERRUPTED."""
SCRIPT = "job.sbatch"
"""Batch script of a submission to Slurm, in its folder."""
BY_HAND = "by_hand"
"""Folder, in a job folder, of the batch script that is for people to submit; drivers submit from numbered ones."""
SUBMITTED = "_submitted.pkl"
"""Suffix of the pickle of a submitted job; its id comes before."""


class JobState(StrEnum):
    """Where a job is in its life, in the same words for every backend."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    OOM = "oom"
    NODE_FAIL = "node_fail"
    PREEMPTED = "preempted"
    INTERRUPTED = "interrupted"
    """It stopped on request and left a checkpoint (exit code 75); the same job submitted again resumes from there."""
    LOST = "lost"
    """The cluster no longer knows the job, and it left no result."""

    @property
    def is_final(self) -> bool:
        return self not in (JobState.QUEUED, JobState.RUNNING)

    @property
    def is_infrastructure_failure(self) -> bool:
        """The machine failed, not the payload: the same job submitted again may well succeed."""
        return self in (JobState.NODE_FAIL, JobState.PREEMPTED, JobState.LOST)


class JobStatus(NamedTuple):
    """State of a job and, in the scheduler's or our own words, why."""

    state: JobState
    reason: str = ""
    """What is behind a semicolon changes by the minute (`Resources; expected to start at 14:05`)."""

    @property
    def gist(self) -> tuple[JobState, str]:
        """What is said again when it changes."""
        return self.state, self.reason.partition("; ")[0]

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else str(self.state)


@dataclass(frozen=True, slots=True)
class Resources:
    """What a job asks for. Zero or empty means: do not ask, take the site's default."""

    num_nodes: int = 1
    tasks_per_node: int = 1
    num_idle_slots: int = 0
    """Tasks fewer than `num_nodes * tasks_per_node`: two nodes of two with one idle slot run three."""
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    memory_bytes: int = 0
    """Per node."""
    time_limit_min: int = 60
    partition: str = ""
    setup: tuple[str, ...] = ()
    """Shell lines run before the tasks start: `module load`, `source env.sh`."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Further sbatch options without their dashes: `{"account": "a1", "exclusive": ""}`; only Slurm reads them."""

    @property
    def num_tasks(self) -> int:
        """Processes of the job on all its nodes."""
        return self.num_nodes * self.tasks_per_node - self.num_idle_slots

    def signal_delay_s(self, wanted_s: int) -> int:
        """How long before the time limit tasks get SIGUSR2: half the limit where that is shorter than `wanted_s`."""
        return min(wanted_s, 30 * self.time_limit_min)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One job to submit: every task calls `entry(*args)` and learns its rank from the environment."""

    name: str
    entry: str
    """`package.module:function`, importable where the job runs."""
    args: tuple[str, ...]
    key: str
    """Identity of the work: a live job with the same key is adopted, not submitted again."""
    folder: Path
    """Logs, pickles and the batch script go here; created with mode 0700."""
    resources: Resources = field(default_factory=Resources)
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of every task."""
    array: str = ""
    """Name shared with the jobs that this one is submitted with, the beginning of its own; empty: it stands alone."""
    is_resumable: bool = False
    """Told to stop, it leaves a checkpoint and a line (`note_stop`), and goes on from there when it starts again."""


class JobId(NamedTuple):
    """What identifies a job, and no one can change."""

    cluster: str
    """The Slurm cluster, of several, that accepted the job; empty: the only one."""
    number: str
    """`12`, an array element `12_3`, a local job's hash."""
    submitted_at_s: float

    def __str__(self) -> str:
        return f"{self.number};{self.cluster}" if self.cluster else self.number  # as `sbatch --parsable` writes it


@dataclass(frozen=True, slots=True)
class JobHandle:
    """A submitted job, as anyone can find it again."""

    backend: str
    job_id: str
    """`JobId.number`."""
    name: str
    """For people; it may be another one in the queue."""
    key: str
    folder: Path
    """On Slurm of this submission alone."""
    num_tasks: int
    submitted_at_s: float
    """By the clock of the machine that submitted it."""
    cluster: str = ""

    @property
    def id(self) -> JobId:
        return JobId(self.cluster, self.job_id, self.submitted_at_s)

    @property
    def script(self) -> str:
        """Path of its batch script, which is of this submission alone and which Slurm lets nobody change."""
        return str(self.folder / SCRIPT)

    def path(self, suffix: str) -> Path:
        """File of this job; the job id leads the name, so that array elements and local jobs can share a folder."""
        return self.folder / f"{self.job_id}_{suffix}"

    def read(self, suffix: str) -> bytes | None:
        """Content of a file of this job; None where there is none.

        A file that a network file system cannot show just now (a stale handle) is one that is not there yet.
        """
        for _ in range(3):
            try:
                return self.path(suffix).read_bytes()
            except FileNotFoundError:
                return None
            except OSError:
                time.sleep(0.2)
        return None

    def __str__(self) -> str:
        return f"job `{self.name}` ({self.backend} {self.job_id})"


class LogPaths(NamedTuple):
    """The two log files of one task."""

    stdout: Path
    stderr: Path


def log_paths(handle: JobHandle, rank: int = 0) -> LogPaths:
    """Where the task of global rank `rank` writes its stdout and stderr (submitit's names)."""
    return LogPaths(handle.path(f"{rank}_log.out"), handle.path(f"{rank}_log.err"))


def submission_folder(folder: Path) -> Path:
    """Where the next submission from a job folder goes: `0`, `1`, ...; the last one again if no job came of it."""
    numbers = [int(path.name) for path in folder.absolute().glob("*/") if re.fullmatch(r"[0-9]{1,9}", path.name)]
    last = folder.absolute() / str(max(numbers, default=0))
    return folder.absolute() / str(max(numbers) + 1) if any(last.glob(f"*{SUBMITTED}")) else last


def make_folder(folder: Path) -> Path:
    """Create the job folder, private to the user: whoever can write to it can run code as its owner.

    Raises:
        LaunchError: the folder belongs to somebody else or cannot be made.
    """
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        what = f"cannot make the job folder: {error.strerror}"
        raise LaunchError(what, where=str(folder), hint="choose another run directory") from error
    return folder


class Launcher(ABC):
    """Runs jobs somewhere. All methods that take a handle work on those that another process created.

    All but `poll` raise a LaunchError where a job is refused or cannot be reached.
    """

    backend: str

    @abstractmethod
    def submit_all(self, specs: Sequence[JobSpec]) -> list[JobHandle]:
        """Start jobs, or queue them, and return without waiting for them; all of them are accepted or none."""

    def submit(self, spec: JobSpec) -> JobHandle:
        """The same for one job."""
        return self.submit_all([spec])[0]

    @abstractmethod
    def poll_all(self, handles: Sequence[JobHandle]) -> list[JobStatus]:
        """What is known about jobs now, in their order; cheap enough to call every second."""

    def poll(self, handle: JobHandle) -> JobStatus:
        """The same for one job."""
        return self.poll_all([handle])[0]

    @abstractmethod
    def cancel(self, *handles: JobHandle) -> None:
        """End the jobs and everything they started; does nothing to a job that has ended."""

    @abstractmethod
    def interrupt(self, handle: JobHandle) -> None:
        """Tell every task to leave a checkpoint and stop (SIGUSR2); the job is INTERRUPTED once they have.

        A job in the queue has nothing to save and is cancelled, one that has ended is left alone. A task that does not
        listen yet comes to no harm, but may miss it: ask again while the job runs.
        """

    @abstractmethod
    def collect(self, handle: JobHandle) -> list[Any]:
        """Return value of every task, by rank, of a job whose state is final.

        Raises:
            Interrupted: the job stopped on request.
            LaunchError: the job did not end well; the message shows the first real error, its rank and its log.
        """
