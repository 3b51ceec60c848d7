"""What a job that is followed tells people: its state, how far it is, and lines of its log, not too many of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dflop.launch import JobHandle, JobState, JobStatus, log_paths
from dflop.run.console import Say
from dflop.run.logs import STEP_LINE

MAX_LINES, PER_S = 120, 60.0
"""Of a job's log in a run's own log: a log page keeps every line, and its server is shared."""


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How a job stands."""

    name: str
    """Within its run: `train`, `data-0`."""
    handle: JobHandle
    status: JobStatus
    step: int = 0
    """Optimizer steps that it has made; 0 also where it makes none."""
    num_steps: int = 0

    @property
    def done_frac(self) -> float:
        """0 to 1, as far as it is known."""
        if self.status.state is JobState.DONE:
            return 1.0
        return self.step / self.num_steps if self.num_steps else 0.0

    def __str__(self) -> str:
        reason = self.status.reason.splitlines()[0] if self.status.reason else ""
        step = f"step {self.step} of {self.num_steps}" if self.num_steps else ""
        return ", ".join(part for part in (str(self.status.state), step, reason) if part)


@runtime_checkable
class ShowsJobs(Protocol):
    """Told how jobs stand; what says lines may be one, too."""

    def job(self, progress: JobProgress) -> None:
        """Take note; called from the event loop, often, and returns at once."""
        ...


class JobTalk:
    """Passes on what there is to tell of one job.

    Args:
        name: Of the job, within its run.
        say: Told lines, and how the job stands if it is one of `ShowsJobs`.
        clock: Seconds; replaced in tests.
    """

    def __init__(self, name: str, say: Say, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._say, self._clock = name, say, clock
        self._show = say.job if isinstance(say, ShowsJobs) else None
        self._known: JobProgress | None = None
        self._since_s, self._num_lines, self._num_hidden = float("-inf"), 0, 0

    def state(self, handle: JobHandle, status: JobStatus, *, is_said: bool = True) -> None:
        """The job's state, or the reason of it, has changed.

        Args:
            handle: The job.
            status: How it stands.
            is_said: Whether a line says so; somebody else may say it of many jobs in one.
        """
        before = self._known
        is_same = before is not None and before.handle.job_id == handle.job_id
        step, num_steps = (before.step, before.num_steps) if before is not None and is_same else (0, 0)
        self._known = JobProgress(self._name, handle, status, step, num_steps)
        if status.state.is_final:
            self._admit_hidden()
        if is_said:
            self._say(f"{handle} is {status}")
        self._tell()

    def line(self, line: str) -> None:
        """A line of its log."""
        if self._known is not None and (found := STEP_LINE.match(line)) is not None:
            known = self._known
            self._known = JobProgress(self._name, known.handle, known.status, int(found[1]), int(found[2]))
            self._tell()
        if self._clock() - self._since_s >= PER_S:
            self._admit_hidden()
            self._since_s, self._num_lines = self._clock(), 0
        self._num_lines += 1
        if self._num_lines > MAX_LINES:
            self._num_hidden += 1
        else:
            self._say(f"{self._name} | {line}")

    def _admit_hidden(self) -> None:
        if self._num_hidden and self._known is not None:
            log = log_paths(self._known.handle).stderr
            self._say(f"{self._name} | [{self._num_hidden} lines not shown; all of them are in {log}]")
        self._num_hidden = 0

    def _tell(self) -> None:
        if self._show is not None and self._known is not None:
            self._show(self._known)
