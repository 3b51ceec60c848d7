"""Entries of the jobs that the launch tests run; imported in the tasks, never by pytest."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from dflop.errors import DataError
from dflop.launch.payload import note_stop
from dflop.train.signals import StopRequest


def report(word: str) -> dict[str, str]:
    """What the task sees of itself: its environment, its node, its argument."""
    print(f"rank {os.environ['RANK']} says {word}")
    return {**os.environ, "hostname": socket.gethostname(), "word": word}


def fail_on(rank: str) -> None:
    """One rank raises, the others hang as in a collective."""
    if os.environ["RANK"] == rank:
        raise ValueError(f"no microbatch for rank {rank}")
    time.sleep(600)


def leave_on(rank: str) -> None:
    """One rank ends with a word to its log, without a result and without a traceback; the others hang."""
    if os.environ["RANK"] == rank:
        print("rank 0 does not answer", file=sys.stderr, flush=True)
        sys.exit(3)
    time.sleep(600)


def stop() -> None:
    """End as a job does that was told to stop and left a checkpoint."""
    sys.exit(75)


def hang(folder: str) -> None:
    """Start a child in a session of its own, note both pids, and never end."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    note = Path(folder) / f"hang-{os.environ['RANK']}.json"
    partial = note.with_suffix(".partial")
    partial.write_text(json.dumps([os.getpid(), child.pid]))
    partial.rename(note)
    child.wait()


def wait_for(path: str) -> str:
    """End when the file appears."""
    while not Path(path).exists():
        time.sleep(0.02)
    return "seen"


def stop_when_told(folder: str, how: str = "") -> str:
    """Train, so to speak, until told to stop: once `listen` is there the way training does, before that not at all.

    Told `once`, a job that was stopped before has nothing left to do.
    """
    rank, stopped = os.environ["RANK"], Path(folder, "stopped")
    Path(folder, f"started-{rank}").touch()
    if how == "once" and stopped.exists():
        return "went on"
    wait_for(f"{folder}/listen")
    stop = StopRequest()
    stop.listen()
    Path(folder, f"listens-{rank}").touch()
    while not stop.is_set():
        time.sleep(0.02)
    if rank == "0":
        note_stop(0, 1)
        stopped.touch()
    wait_for(str(stopped))
    sys.exit(75)


def work_on(folder: str, last: str, gain: str) -> int:
    """Get on by `gain`, say so, and stop as if told to; what was reached `last` has nothing left to do."""
    progress = Path(folder, "progress")
    before = int(progress.read_text()) if progress.exists() else 0
    if before >= int(last):
        return before
    now = before + int(gain)
    progress.write_text(str(now))
    note_stop(before, now)
    sys.exit(75)


def fail_once(folder: str, name: str) -> str:
    """Fail the first time, and say who runs each time."""
    note = Path(folder, f"ran-{name}")
    is_first = not note.exists()
    note.write_text(note.read_text() + "x" if not is_first else "x")
    if is_first and name == "bad":
        raise ValueError("bad luck")
    return name


def fail_with_hint() -> None:
    """An error of ours, with all that belongs to one."""
    raise DataError("a disk is missing", where="here", hint="buy one")
