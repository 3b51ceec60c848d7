"""One run of the campaign while it is played: its commands, its processes, and what an operator sees of them."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dflop.run.directory import RunDir
from tests.chaos.stage import REPO

MARK = "DFLOP_CHAOS"
"""Variable by which every process of a run is found, no matter what started it."""


class NothingToStrike(Exception):
    """What a fault is aimed at is not there."""


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    said: str


class Play:
    """A run that is being disturbed; `command` are arguments of `dflop`, `rng` makes all choices."""

    def __init__(self, folder: Path, rng: random.Random, command: tuple[str, ...]) -> None:
        self.folder, self.rng, self.command = folder, rng, command
        self.store, self.runs, self.annotations = folder / "store", folder / "runs", folder / "data/annotations.jsonl"
        self.mark = f"{folder.name}-{os.getpid()}"
        self.ended: list[Ended] = []
        # Ids of samples that have to be in quarantine in the end, and of those that may.
        self.must_be_left_out, self.may_be_left_out = set[str](), set[str]()
        self.notes: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._began_s = 0.0
        self._timers: list[threading.Timer] = []
        self._others: list[subprocess.Popen[bytes]] = []
        self._place: dict[str, Any] = {"cwd": folder, "stdin": subprocess.DEVNULL, "env": os.environ | {
            MARK: self.mark, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "NO_COLOR": "1",
            "PREFECT_HOME": str(folder / "prefect"),
        }}  # fmt: skip

    def start(self, *, dies_at: str = "") -> None:
        """Issue the command."""
        module = ("tests.chaos.dying", dies_at) if dies_at else ("dflop.cli",)
        self._process, self._began_s = self._open("-m", *module, *self.command, log=self.log), time.monotonic()

    def look(self) -> Ended | None:
        """Whether the command has ended."""
        code = self._process.poll() if self._process else None
        if code is None:
            return None
        self.ended.append(Ended(code, self.log.read_text(errors="replace")))
        self._process = None
        return self.ended[-1]

    def send(self, number: int) -> None:
        """A signal to the command."""
        assert self._process is not None
        self._process.send_signal(number)

    def dflop(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another command, to its end."""
        words = [sys.executable, "-m", "dflop.cli", *arguments]
        return subprocess.run(words, capture_output=True, text=True, timeout=90, check=False, **self._place)

    def also(self, *words: str) -> subprocess.Popen[bytes]:
        """Start `python WORDS` next to the command; it is ended with the run."""
        self._others.append(self._open(*words, log=self.folder / f"other-{len(self._others)}.log"))
        return self._others[-1]

    def _open(self, *words: str, log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as out:
            return subprocess.Popen([sys.executable, *words], stdout=out, stderr=out, **self._place)

    def later(self, delay_s: float, deed: Callable[[], object]) -> None:
        """Do something in a while; the next command is issued behind it."""
        self._timers.append(threading.Timer(delay_s, deed))
        self._timers[-1].start()

    def settle(self) -> None:
        for timer in self._timers:
            timer.join()

    def end_others(self) -> None:
        for process in self._others:
            process.kill()
            process.wait()

    def end_all(self) -> None:
        """Kill whatever is left, by pid."""
        self.settle()
        self._others += [self._process] if self._process is not None else []
        self.end_others()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def log(self) -> Path:
        return self.folder / f"command-{len(self.ended)}.log"

    @property
    def run(self) -> RunDir | None:
        """The run directory, once there is one."""
        found = sorted(self.runs.glob("chaos-*"))
        return RunDir(found[0]) if found else None

    def age_s(self) -> float:
        """Of the command."""
        return time.monotonic() - self._began_s

    def pid_files(self, job: str, pattern: str = "*_0.pid") -> list[Path]:
        """Files of a job's folder, those of the newest job last."""
        found = self.run.job_folder(job).glob(f"**/{pattern}") if self.run else ()
        return sorted(found, key=lambda path: path.stat().st_mtime)

    def job_age_s(self, job: str) -> float:
        """How long the newest job of a folder has run; negative where there is none."""
        files = self.pid_files(job)
        return time.time() - files[-1].stat().st_mtime if files else -1.0

    def steps_done(self) -> int:
        """Last step that rank 0 of the newest training job has logged."""
        logs = self.pid_files("train", "*_0_log.err")
        found = re.findall(r"^step \d+  (\d+)/", logs[-1].read_text(errors="replace"), re.MULTILINE) if logs else []
        return max(map(int, found), default=0)

    def ranks(self, job: str) -> list[int]:
        """Pids of the tasks of the newest job of a folder that live, by rank."""
        alive, newest = self.processes(), self.pid_files(job)[-1:]
        files = sorted(p for path in newest for p in path.parent.glob(path.name.replace("_0.pid", "_[0-9].pid")))
        return [pid for path in files if (pid := int(path.read_text().split()[0])) in alive]

    def processes(self, words: str = "") -> dict[int, str]:
        """Command lines of this run's live processes, by pid; of those alone that have `words` in it."""
        wanted, found = f"{MARK}={self.mark}".encode(), dict[int, str]()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                if wanted not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and words in line:
                    found[int(entry.name)] = line
        return found
