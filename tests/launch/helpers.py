"""What the launch and Slurm tests share: specs of the jobs in entries.py, waiting for them, background processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dflop.launch import JobHandle, JobSpec, JobState, JobStatus, Journal, Launcher, Resources, run_jobs_async

T = TypeVar("T")

REPO = Path(__file__).parents[2]


def make_spec(folder: Path, function: str, *args: str, num_tasks: int = 1, **fields: Any) -> JobSpec:
    """Spec of a job that runs a function of entries.py."""
    env = {"PYTHONPATH": str(REPO), **fields.pop("env", {})}
    given = {"name": function, "key": function, "entry": f"tests.launch.entries:{function}"}
    given["resources"] = Resources(tasks_per_node=num_tasks)
    return JobSpec(folder=folder, args=args, env=env, **given | fields)


def until(find: Callable[[], T | None], *, what: str, limit_s: float = 60.0) -> T:
    """First thing that is not None or False; who waits long looks less often, for it may take a process to look."""
    began = now = time.monotonic()
    while now < began + limit_s:
        if found := find():
            return found
        time.sleep(min(0.25, 0.02 + (now - began) / 20))
        now = time.monotonic()
    pytest.fail(f"waited {limit_s:g} s for {what}")


class OneByOne(Launcher):
    """A launcher of tests, which say what happens to one job."""

    def submit_all(self, specs: Sequence[JobSpec]) -> list[JobHandle]:
        return [self.submit(spec) for spec in specs]

    def poll_all(self, handles: Sequence[JobHandle]) -> list[JobStatus]:
        return [self.poll(handle) for handle in handles]


class Background:
    """`python -m words` in the background; its output is in a file, so that nobody has to drain a pipe."""

    def __init__(self, *words: str, log: Path, cwd: Path = REPO, **env: str) -> None:
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *words], cwd=cwd, env={**os.environ, **env}, stdin=subprocess.DEVNULL,
                stdout=out, stderr=out,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self.log.read_text()

    def shows(self, find: Callable[[], T | None], *, what: str, limit_s: float = 240) -> T:
        """As `until`, for as long as it lives."""

        def look() -> T | None:
            found = find()
            assert found or self.process.poll() is None, f"ended before {what}:\n{self.output}"
            return found

        return until(look, what=f"{what}:\n{self.output[-2000:]}", limit_s=limit_s)

    def hears(self, text: str, limit_s: float = 60) -> None:
        """Returns once its output has this text."""
        self.shows(lambda: text in self.output, what=f"`{text}` in {self.log}", limit_s=limit_s)

    def ends(self, code: int, limit_s: float = 240) -> str:
        """Its output, once it has ended with this exit code and without a traceback."""
        assert self.process.wait(limit_s) == code, self.output
        assert "Traceback" not in self.output, self.output
        return self.output

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *_: object) -> None:
        """Tells it to stop, and kills it where it does not."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.kill()


def end(launcher: Launcher, handle: JobHandle) -> JobStatus:
    """Final status of the job."""
    return until(lambda: s if (s := launcher.poll(handle)).state.is_final else None, what=f"{handle} to end")


def run_job(launcher: Launcher, spec: JobSpec, journal: Journal, **options: Any) -> list[Any]:
    """Values of the tasks of a job, adopted or submitted."""
    (values,) = asyncio.run(run_jobs_async(launcher, [spec], journal, poll_interval_s=0.05, **options))
    return values


def live(journal: Journal, key: str) -> JobHandle | None:
    """The latest job with this key, unless it was seen to end."""
    handle, state = journal.latest().get(key, (None, JobState.LOST))
    return None if state.is_final else handle


def pids_of_hang(folder: Path, rank: int) -> list[int]:
    """[task, its child] of an entry that hangs, once it does."""
    note = folder / f"hang-{rank}.json"
    until(note.exists, what=f"rank {rank} to hang")
    return list(json.loads(note.read_text()))


def all_noted(folder: Path, what: str, num_tasks: int) -> None:
    """Returns once every task of `stop_when_told` has left its note."""
    until(lambda: len(list(folder.glob(f"{what}-*"))) == num_tasks, what=f"{num_tasks} tasks: {what}")


def parent_of(pid: int) -> int | None:
    """Of a process; None where it has gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_gone(pid: int) -> bool:
    """No process, or a zombie that nobody has reaped yet."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
