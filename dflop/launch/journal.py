"""What became of the jobs of a run, for people and for the next driver.

`<run_dir>/jobs.jsonl` holds one `JobRecord` per submission and change of state; `dflop runs` and the store read it.
Which jobs there are is in their folders, too (`submitted.py`), so what a crash keeps from being noted is found. A job
is known by its id and its time of submission, which is that of its first record. What is noted together is a single
write followed by fsync (a few ms), so a crash can tear only the last line; what was read once is kept.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from dflop.errors import LaunchError
from dflop.launch.job import JobHandle, JobState, JobStatus
from dflop.records import JobRecord, from_dict, parse_json, to_dict

FILE_NAME = "jobs.jsonl"
_MAX_LINE_BYTES = 1 << 16
Change = tuple[JobHandle, JobStatus]


class Journal:
    """Append-only job history of one run directory; other processes may append to it, too."""

    def __init__(self, run_dir: Path, run_id: str) -> None:
        self.path = run_dir / FILE_NAME
        self.run_id = run_id
        self._forget()

    def submitted(self, *handles: JobHandle) -> None:
        """Note new jobs; call it before waiting."""
        self._read()
        rows = []
        for handle in handles:
            attempt = 1 + max((record.attempt for record in self._of_key[handle.key]), default=-1)
            rows.append(self._row(handle, JobStatus(JobState.QUEUED), attempt, handle.submitted_at_s))
        self._append(rows)

    def changed(self, handle: JobHandle, status: JobStatus) -> None:
        """Note a job's new state; a state it already has is not noted again."""
        self.changes([(handle, status)])

    def changes(self, changes: Sequence[Change]) -> None:
        """Note the new states of several jobs."""
        self._read()
        now_s = time.time()
        rows = []
        for handle, status in changes:
            last = self._last.get((handle.job_id, handle.submitted_at_s))
            if last is None or last.state != status.state:
                rows.append(self._row(handle, status, last.attempt if last else 0, now_s))
        self._append(rows)

    def known(self) -> set[tuple[str, float]]:
        """Id and time of submission of every job that was noted."""
        self._read()
        return set(self._last)

    def live(self, key: str) -> JobHandle | None:
        """The latest job with this key that was not seen to end, or None. It may have ended unseen: poll it."""
        return self._latest(key, is_final=False)

    def ended(self, key: str) -> tuple[JobHandle, JobState] | None:
        """The latest job with this key and how it ended; None where none was submitted or it may live."""
        handle = self._latest(key, is_final=True)
        return (handle, JobState(self._of_key[key][-1].state)) if handle else None

    def records(self) -> list[JobRecord]:
        """Everything noted so far, oldest first.

        Raises:
            LaunchError: a line that is not the last is damaged.
        """
        self._read()
        return list(self._known)

    def _forget(self) -> None:
        self._known: list[JobRecord] = []
        self._of_key: dict[str, list[JobRecord]] = defaultdict(list)
        self._last: dict[tuple[str, float], JobRecord] = {}
        """The last record of each job; a job's first record is as old as the job."""
        self._first: dict[tuple[str, str, int], JobRecord] = {}
        """The first one of each job, by key, id and attempt."""
        self._num_read_bytes = 0

    def _read(self) -> None:
        """Take in what was appended since the last time."""
        if not self.path.exists():
            self._forget()
            return
        if self.path.stat().st_size < self._num_read_bytes:  # somebody else cut it
            self._forget()
        with self.path.open("rb") as file:
            file.seek(self._num_read_bytes)
            lines = file.read().splitlines(keepends=True)
        for line in lines:
            if not line.endswith(b"\n"):
                break  # torn by a crash; the next append drops it
            try:
                record = from_dict(JobRecord, parse_json(line))
                JobState(record.state)
            except (ValueError, TypeError) as error:
                raise LaunchError(
                    f"line {len(self._known) + 1} of the job journal is damaged: {error}",
                    where=str(self.path),
                    hint="delete that line; jobs noted only there will not be adopted",
                ) from error
            self._known.append(record)
            self._of_key[record.job_key].append(record)
            first = self._first.setdefault((record.job_key, record.job_id, record.attempt), record)
            self._last[record.job_id, first.observed_at_s] = record
            self._num_read_bytes += len(line)

    def _latest(self, key: str, *, is_final: bool) -> JobHandle | None:
        self._read()
        records = self._of_key[key]
        if not records or JobState(records[-1].state).is_final != is_final:
            return None
        first = self._first[key, records[-1].job_id, records[-1].attempt]
        return JobHandle(
            backend=first.backend,
            job_id=first.job_id,
            name=first.job_name,
            key=first.job_key,
            folder=Path(first.folder),
            num_tasks=first.num_tasks,
            submitted_at_s=first.observed_at_s,
        )

    def _row(self, handle: JobHandle, status: JobStatus, attempt: int, at_s: float) -> JobRecord:
        return JobRecord(
            run_id=self.run_id,
            job_name=handle.name,
            job_key=handle.key,
            backend=handle.backend,
            job_id=handle.job_id,
            state=status.state.value,
            reason=status.reason,
            folder=str(handle.folder),
            num_tasks=handle.num_tasks,
            attempt=attempt,
            observed_at_s=at_s,
        )

    def _append(self, rows: Sequence[JobRecord]) -> None:
        if not rows:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = b"".join(json.dumps(to_dict(row)).encode() + b"\n" for row in rows)
        with self.path.open("ab+") as file:
            _drop_torn_line(file.fileno())
            os.write(file.fileno(), text)
            os.fsync(file.fileno())


def _drop_torn_line(fd: int) -> None:
    size = os.fstat(fd).st_size
    start = max(0, size - _MAX_LINE_BYTES)
    tail = os.pread(fd, size - start, start)
    if tail and not tail.endswith(b"\n"):
        os.ftruncate(fd, start + tail.rfind(b"\n") + 1)
