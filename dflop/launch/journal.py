"""Which jobs a run has submitted, on disk before anyone waits for them.

`<run_dir>/jobs.jsonl` holds one `JobRecord` per submission and change of state. It outlives the driver: after a
kill -9, the next driver finds the live job with the same key here and adopts it. Appends are single writes followed
by fsync (a few ms, a few per job), so a crash can tear only the last line.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from dflop.errors import LaunchError
from dflop.launch.job import JobHandle, JobState, JobStatus
from dflop.records import JobRecord, from_dict, to_dict

FILE_NAME = "jobs.jsonl"


class Journal:
    """Append-only job history of one run directory."""

    def __init__(self, run_dir: Path, run_id: str) -> None:
        self.path = run_dir / FILE_NAME
        self.run_id = run_id

    def submitted(self, handle: JobHandle) -> JobRecord:
        """Note a new job; call it before waiting."""
        attempt = len({r.job_id for r in self.records() if r.job_key == handle.key})
        return self._append(handle, JobStatus(JobState.QUEUED), attempt, handle.submitted_at_s)

    def changed(self, handle: JobHandle, status: JobStatus) -> JobRecord:
        """Note a job's new state; a state it already has is not noted again."""
        earlier = [r for r in self.records() if r.job_id == handle.job_id]
        if earlier and earlier[-1].state == status.state:
            return earlier[-1]
        return self._append(handle, status, earlier[0].attempt if earlier else 0, time.time())

    def live(self, key: str) -> JobHandle | None:
        """The latest job with this key that was not seen to end, or None. It may have ended unseen: poll it."""
        records = [r for r in self.records() if r.job_key == key]
        if not records or JobState(records[-1].state).is_final:
            return None
        job = [r for r in records if r.job_id == records[-1].job_id]
        first = job[0]
        return JobHandle(
            backend=first.backend,
            job_id=first.job_id,
            name=first.job_name,
            key=first.job_key,
            folder=Path(first.folder),
            num_tasks=first.num_tasks,
            submitted_at_s=first.observed_at_s,
        )

    def records(self) -> list[JobRecord]:
        """Everything noted so far, oldest first.

        Raises:
            LaunchError: a line that is not the last is damaged.
        """
        if not self.path.exists():
            return []
        lines = self.path.read_text().splitlines(keepends=True)
        found = []
        for number, line in enumerate(lines, start=1):
            try:
                found.append(from_dict(JobRecord, json.loads(line)))
            except (ValueError, KeyError) as error:
                if number == len(lines) and not line.endswith("\n"):
                    break  # torn by a crash; the next append starts a new line
                raise LaunchError(
                    f"line {number} of the job journal is damaged: {error}",
                    where=str(self.path),
                    hint="delete that line; jobs noted only there will not be adopted",
                ) from error
        return found

    def _append(self, handle: JobHandle, status: JobStatus, attempt: int, at_s: float) -> JobRecord:
        record = JobRecord(
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
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            _drop_torn_line(file.fileno())
            os.write(file.fileno(), json.dumps(to_dict(record)).encode() + b"\n")
            os.fsync(file.fileno())
        return record


def _drop_torn_line(fd: int) -> None:
    size = os.fstat(fd).st_size
    content = os.pread(fd, size, 0)
    if not content.endswith(b"\n") and content:
        os.ftruncate(fd, content.rfind(b"\n") + 1)
