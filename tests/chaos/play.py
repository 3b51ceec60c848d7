"""One run of the campaign while it is played: its commands, its processes, and what an operator sees of them."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflop.jobs.rundir import RunDir
from tests.chaos.stage import REPO, Stage

MARK = "DFLOP_CHAOS"
"""Variable by which every process of a run is found, whoever started it."""
DFLOP = ("-m", "dflop.cli")
_STEP = re.compile(r"^step (\d+)/", re.MULTILINE)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    said: str
    took_s: float


class Play:
    """A run that is being disturbed.

    Args:
        stage: Its folder.
        rng: Of all choices made in it.
        command: Arguments of `dflop`.
    """

    def __init__(self, stage: Stage, rng: random.Random, command: tuple[str, ...]) -> None:
        self.stage, self.rng, self.command = stage, rng, command
        self.mark = f"{stage.folder.name}-{os.getpid()}"
        self.ended: list[Ended] = []
        self.must_be_left_out: set[str] = set()
        """Ids of samples that have to be in quarantine in the end, besides those that are broken from the beginning."""
        self.may_be_left_out: set[str] = set()
        self.notes: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._began_s = 0.0
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._beside: list[subprocess.Popen[bytes]] = []

    # What an operator does.

    def start(self, *, dies_at: str = "") -> None:
        """Issue the command."""
        module = ("-m", "tests.chaos.dying", dies_at) if dies_at else DFLOP
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, *module, *self.command],
                cwd=self.stage.folder, env=self.environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self._began_s = time.monotonic()

    def look(self) -> Ended | None:
        """Whether the command has ended."""
        assert self._process is not None, "a command was issued"
        code = self._process.poll()
        if code is None:
            return None
        self.ended.append(Ended(code, self.log.read_text(errors="replace"), self.age_s()))
        self._process = None
        return self.ended[-1]

    def send(self, number: int) -> None:
        """A signal to the command."""
        if self._process is not None:
            self._process.send_signal(number)

    def dflop(self, *arguments: str, limit_s: float = 90) -> subprocess.CompletedProcess[str]:
        """Another command, to its end."""
        return subprocess.run(
            [sys.executable, "-m", "dflop.cli", *arguments], cwd=self.stage.folder, env=self.environment,
            capture_output=True, text=True, timeout=limit_s, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def beside(self, *words: str) -> subprocess.Popen[bytes]:
        """Start `python WORDS` beside the command; it is ended with the run."""
        out = (self.stage.folder / f"beside-{len(self._beside)}.log").open("wb")
        with out:
            self._beside.append(
                subprocess.Popen(
                    [sys.executable, *words], cwd=self.stage.folder, env=self.environment, stdout=out, stderr=out,
                    stdin=subprocess.DEVNULL,
                )
            )  # fmt: skip
        return self._beside[-1]

    def later(self, delay_s: float, deed: Callable[[], None]) -> None:
        """Do something in a while, or when the command has ended."""
        self._later.append((time.monotonic() + delay_s, deed))

    def tend(self, *, at_once: bool = False) -> None:
        """Do what is due."""
        now = time.monotonic()
        due = [deed for at_s, deed in self._later if at_once or at_s <= now]
        self._later = [] if at_once else [(at_s, deed) for at_s, deed in self._later if at_s > now]
        for deed in due:
            try:
                deed()
            except Exception as error:  # what is undone too late must not end the campaign
                self.note(f"later: {type(error).__name__}: {error}")

    def note(self, text: str) -> None:
        """Keep for the record what was done."""
        self.notes.append(text)

    # What can be seen.

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            MARK: self.mark, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1",
            "PREFECT_HOME": str(self.stage.folder / "prefect"), "NO_COLOR": "1",
        }  # fmt: skip

    @property
    def log(self) -> Path:
        return self.stage.folder / f"command-{len(self.ended)}.log"

    @property
    def run(self) -> RunDir | None:
        """The run directory, once there is one."""
        found = sorted(self.stage.runs.glob("chaos-*")) if self.stage.runs.is_dir() else []
        return RunDir(found[0]) if found else None

    @property
    def pid(self) -> int:
        """Of the command."""
        assert self._process is not None, "a command was issued"
        return self._process.pid

    def age_s(self) -> float:
        """Of the command."""
        return time.monotonic() - self._began_s

    def job_age_s(self, name: str) -> float:
        """How long the newest job of a folder has run; negative where there is none."""
        files = self.files_of(name, "*_0.pid")
        return time.time() - files[-1].stat().st_mtime if files else -1.0

    def files_of(self, job: str, pattern: str) -> list[Path]:
        """Files of a job's folder, the newest last."""
        if self.run is None:
            return []
        return sorted(self.run.job_folder(job).glob(pattern), key=lambda path: path.stat().st_mtime)

    def steps_done(self) -> int:
        """Last step that rank 0 of the newest training job has told of."""
        logs = self.files_of("train", "*_0_log.err")
        found = _STEP.findall(logs[-1].read_text(errors="replace")) if logs else []
        return max(map(int, found), default=0)

    def ranks(self, job: str = "train") -> list[int]:
        """Pids of the tasks of the newest job of a folder that live, by rank."""
        files = self.files_of(job, "*_0.pid")
        if not files:
            return []
        prefix, alive = files[-1].name.removesuffix("_0.pid"), self.processes()
        pids = [int(p.read_text().split()[0]) for p in sorted(files[-1].parent.glob(f"{prefix}_[0-9].pid"))]
        return [pid for pid in pids if pid in alive]

    def processes(self, words: str = "") -> dict[int, str]:
        """Command lines of this run's live processes, by pid; of those alone that have `words` in it."""
        wanted, found = f"{MARK}={self.mark}".encode(), dict[int, str]()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError, IndexError):
                if wanted not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and words in line:
                    found[int(entry.name)] = line
        return found

    def end_beside(self) -> None:
        """End what was started beside the command."""
        for process in self._beside:
            process.kill()
            process.wait()

    def end_all(self) -> None:
        """Kill whatever is left, by pid."""
        self.end_beside()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
