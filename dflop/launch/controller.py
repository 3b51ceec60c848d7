"""The process that owns a local job: starts its tasks, watches them, and ends them together.

`python -m dflop.launch.controller FOLDER JOB_ID PLACES MAX_JOBS [ENTRY ARGS...]`, started by `local.py` in a session of
its own, so that the job outlives the process that submitted it. submitit's controller does the starting; added here are
waiting for a place, a job id that is not a pid, the end of the whole job when one task fails (its peers would hang in a
collective for ever), a record of how each task ended, and no orphans. It looks 24 times a second, so a killed rank is
seen within 50 ms.

With an entry it imports the entry's module once and forks the tasks: where cores are few, importing torch and a model's
code per rank is most of a short job.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.core.submission import process_job
from submitit.core.utils import JobPaths
from submitit.local.local import Controller

from dflop import files
from dflop.launch.payload import preload
from dflop.launch.process import Child, ProcessId, adopt_orphans, family, kill_all

PLACE_POLL_S = 0.2
"""Between two looks for a place; who waits must not disturb those who measure."""
PEER_GRACE_S = 2.0
"""How long the other tasks may go on after one failed: long enough to write the traceback that explains the failure."""


class JobController(Controller):
    """submitit's controller, for one job id; leaves `<job_id>_exit.json` behind."""

    def __init__(self, folder: Path, job_id: str) -> None:
        super().__init__(folder)
        self.pid = job_id  # submitit names the job's files after it
        self.exit_record: dict[str, Any] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.default_int_handler)

    def fork_tasks(self, entry: str, args: Sequence[str]) -> bool:
        """Fork all tasks; returns True in each of them, with its rank in the environment and its logs open."""
        with contextlib.suppress(Exception, SystemExit):  # the tasks meet the same and report it
            preload(entry, args)
        gc.freeze()  # the tasks' collectors would write to, hence copy, every object imported here
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        for rank in range(self.ntasks):
            if (pid := os.fork()) == 0:
                _become_task(JobPaths(self.folder, self.pid, rank), rank)
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                return True
            self.tasks.append(Child(pid))  # type: ignore[arg-type]  # as much of Popen as a controller uses
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return False

    def start_tasks(self) -> None:
        """Start those that were not forked."""
        if not self.tasks:
            super().start_tasks()

    def wait(self, freq: int = 24) -> Sequence[int | None]:
        """Watch until all tasks have ended, one has failed, or the time limit has passed."""
        limit = time.monotonic() + self.timeout_s
        warn_at = limit - self.signal_delay_s
        dead_rank: int | None = None
        while True:
            codes = [task.poll() for task in self.tasks]
            now = time.monotonic()
            if dead_rank is None and (failed := [rank for rank, code in enumerate(codes) if code]):
                # Signals first: of several tasks seen dead at once, that one did not die of the others.
                dead_rank = min(failed, key=lambda rank: (codes[rank] or 0) > 0)
                limit = min(limit, now + PEER_GRACE_S)
            if None not in codes or now >= limit:
                timed_out = dead_rank is None and None in codes
                self.exit_record = {"codes": codes, "dead_rank": dead_rank, "timed_out": timed_out}
                return codes
            must_tell = signal.sigtimedwait({signal.SIGUSR2}, 0) is not None  # it is blocked here, see `local.py`
            if now >= warn_at:
                warn_at, must_tell = float("inf"), True
            if must_tell and dead_rank is None:
                self._forward_signal(signal.SIGUSR2)
            time.sleep(1 / freq)


def _become_task(paths: JobPaths, rank: int) -> None:
    """What an exec would have done for this fork of the controller."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for path, stream in ((paths.stdout, 1), (paths.stderr, 2)):
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(log, stream)
        os.close(log)
    os.environ |= {
        "SUBMITIT_LOCAL_LOCALID": str(rank),
        "SUBMITIT_LOCAL_GLOBALID": str(rank),
        "SUBMITIT_LOCAL_JOB_ID": str(paths.job_id),
    }
    with contextlib.suppress(OSError):  # for people who look at `top`
        Path("/proc/self/comm").write_text(f"rank{rank}")


def take_place(places: int, max_jobs: int) -> None:
    """Wait for one of `max_jobs` places and keep it to the end of this process: a lock on a byte of the open file."""
    while True:
        for place in range(max_jobs):
            with contextlib.suppress(BlockingIOError):
                fcntl.lockf(places, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                return
        time.sleep(PLACE_POLL_S)


def main(folder: str, job_id: str, places: str, max_jobs: str, entry: str = "", *args: str) -> None:
    """Run the job to its end, take everything it started down with it, and only then say how it ended."""
    me = ProcessId.of(os.getpid())
    assert me is not None
    adopt_orphans()
    controller = JobController(Path(folder), job_id)
    is_task = False
    try:
        take_place(int(places), int(max_jobs))
        is_task = bool(entry) and controller.fork_tasks(entry, args)
        if not is_task:
            controller.run(max_retry=1)
    except KeyboardInterrupt:
        print(f"job {job_id} was told to stop", file=sys.stderr)
    finally:
        if not is_task:
            kill_all(set(family(me)) - {me})
    if is_task:
        process_job(folder)  # and from there to the end of the program, as a task that was started does
    elif controller.exit_record is not None:
        files.replace(Path(folder) / f"{job_id}_exit.json", json.dumps(controller.exit_record))


if __name__ == "__main__":
    main(*sys.argv[1:])
