"""What became of the jobs of a run, for people and for the next driver.

`<run_dir>/jobs.jsonl` holds one `JobRecord` per submission and change of state; `dflop runs` and the store read it.
Which jobs there are is in their folders, too (`submitted_in`), so what a crash keeps from being noted is found. The
first record of a job has its time of submission. What is noted together is a single
write followed by fsync (a few ms), so a crash can tear only the last line; what was read once is kept.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dflop.errors import LaunchError
from dflop.launch.job import JobHandle, JobId, JobState, JobStatus
from dflop.records import JobRecord, from_dict, parse_json, to_dict

_MAX_LINE_BYTES = 1 << 16
Change = tuple[JobHandle, JobStatus]


class Noted(NamedTuple):
    """A job, and the last that was noted of it; it may have ended unseen."""

    handle: JobHandle
    last: JobRecord

    @property
    def state(self) -> JobState:
        return JobState(self.last.state)

    @property
    def name(self) -> str:
        """Without the run's id."""
        return self.handle.name.removeprefix(f"{self.last.run_id}-")

    @property
    def took_s(self) -> float | None:
        """From submission to its last change of state; None while it lives."""
        return self.last.observed_at_s - self.handle.submitted_at_s if self.state.is_final else None


class Journal:
    """Append-only job history of one run directory; other processes may append to it, too."""

    def __init__(self, run_dir: Path, run_id: str) -> None:
        self.path = run_dir / "jobs.jsonl"
        self.run_id = run_id
        self._records: list[JobRecord] = []
        self._num_read_bytes = 0

    def submitted(self, *handles: JobHandle) -> None:
        """Note new jobs; call it before waiting."""
        queued, next_attempt = JobStatus(JobState.QUEUED), {r.job_key: r.attempt + 1 for r in self.records()}
        self._append([self._row(h, queued, next_attempt.get(h.key, 0), h.submitted_at_s) for h in handles])

    def changes(self, changes: Sequence[Change]) -> None:
        """Note new states of jobs; a state that a job already has is not noted again."""
        rows, jobs, now_s = [], self.jobs(), time.time()
        for handle, status in changes:
            _, last = jobs.get(handle.id, (handle, None))
            if last is None or last.state != status.state:
                rows.append(self._row(handle, status, last.attempt if last else 0, now_s))
        self._append(rows)

    def jobs(self) -> dict[JobId, Noted]:
        """Every job, in the order of submission."""
        found: dict[JobId, Noted] = {}
        handles: dict[tuple[str, str, int], JobHandle] = {}
        for r in self.records():
            job = r.job_key, r.job_id, r.attempt
            if job not in handles:
                (number, _, cluster), folder = r.job_id.partition(";"), Path(r.folder)
                handles[job] = JobHandle(
                    r.backend, number, r.job_name, r.job_key, folder, r.num_tasks, r.observed_at_s, cluster
                )
            found[handles[job].id] = Noted(handles[job], r)
        return found

    def latest(self) -> dict[str, tuple[JobHandle, JobState]]:
        """The latest job with each key, and its state."""
        return {job.handle.key: (job.handle, job.state) for job in self.jobs().values()}

    def records(self) -> list[JobRecord]:
        """Everything noted so far, oldest first; what was appended since the last time is read.

        Raises:
            LaunchError: a line that is not the last is damaged.
        """
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < self._num_read_bytes:  # somebody else cut it
            self._records, self._num_read_bytes = [], 0
        text = b""
        if size > self._num_read_bytes:
            with self.path.open("rb") as file:
                file.seek(self._num_read_bytes)
                text = file.read()
        for line in text.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break  # torn by a crash; the next append drops it
            try:
                record = from_dict(JobRecord, parse_json(line))
                JobState(record.state)
            except (ValueError, TypeError) as error:
                raise LaunchError(
                    f"line {len(self._records) + 1} of the job journal is damaged: {error}",
                    where=str(self.path),
                    hint="delete that line; jobs recorded only there will not be adopted",
                ) from error
            self._records.append(record)
            self._num_read_bytes += len(line)
        return list(self._records)

    def _row(self, handle: JobHandle, status: JobStatus, attempt: int, at_s: float) -> JobRecord:
        return JobRecord(
            run_id=self.run_id, job_name=handle.name, job_key=handle.key, backend=handle.backend, job_id=str(handle.id),
            state=status.state.value, reason=status.reason, folder=str(handle.folder), num_tasks=handle.num_tasks,
            attempt=attempt, observed_at_s=at_s,
        )  # fmt: skip

    def _append(self, rows: Sequence[JobRecord]) -> None:
        if not rows:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            _drop_torn_line(file.fileno())
            os.write(file.fileno(), b"".join(json.dumps(to_dict(row)).encode() + b"\n" for row in rows))
            os.fsync(file.fileno())


def _drop_torn_line(fd: int) -> None:
    size = os.fstat(fd).st_size
    start = max(0, size - _MAX_LINE_BYTES)
    tail = os.pread(fd, size - start, start)
    if tail and not tail.endswith(b"\n"):
        os.ftruncate(fd, start + tail.rfind(b"\n") + 1)
