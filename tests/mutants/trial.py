"""Runs tests on a copy of the tree, in which one fault was made.

`PYTHONPATH` puts the copy before the installed checkout in this process' children and theirs: jobs, ranks, workers.
Whatever a test leaves running is ended before the next one begins.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from dflop.launch.process import kill_all, processes_where
from tests.mutants.table import Mutant

LOOKS_EVERY_S = 2.0
_VARIABLE = "DFLOP_TRIAL"
_FAILED = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+(?:\[.*?\])?)(?: - |$)", re.MULTILINE)
_PYTEST = ("-q", "-p", "no:cacheprovider", "-p", "no:tests.budget", "--hypothesis-profile=ci", "--timeout", "300")


@dataclass(frozen=True, slots=True)
class Trial:
    """How tests are run."""

    tree: Path
    """Whose tracked files are copied."""
    scratch: Path
    marks: str
    """Expression of pytest's `-m`; empty: its default."""
    limit_s: float
    """Of processor time, of one fault: on a busy machine a clock would end those that have hardly begun."""

    @property
    def home(self) -> Path:
        """Of this process, the same for all its faults, so that kernels on disk are found again."""
        return self.scratch / str(os.getpid())

    def copy(self) -> Path:
        """A new copy of the tracked files, in place of the one before."""
        folder = self.home / "tree"
        shutil.rmtree(self.home / "tmp", ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        (self.home / "tmp").mkdir(parents=True)
        listed = subprocess.run(["git", "-C", str(self.tree), "ls-files", "-z"], capture_output=True, check=True)
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (self.tree / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self.tree / name, folder / name)
        return folder

    def pytest(self, folder: Path, words: Sequence[str], *, limit_s: float, kernels: str = "kernels") -> Outcome:
        """What pytest makes of a copy; everything it has started has ended by then."""
        kernels_dir = self.home / kernels
        env = os.environ | {
            "PYTHONPATH": str(folder), "TMPDIR": str(self.home / "tmp"), "NUMBA_CACHE_DIR": str(kernels_dir),
            _VARIABLE: str(os.getpid()),
        }  # fmt: skip
        marks = ["-m", self.marks] if self.marks else []
        command = [sys.executable, "-m", "pytest", *_PYTEST, *marks, *words]
        code: int | None = None
        with (self.home / "output").open("w+") as output:
            child = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output)
            while code is None and _used_s(_started()) < limit_s:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = child.wait(LOOKS_EVERY_S)
            kill_all(_started())
            child.wait()
            output.seek(0)
            return Outcome(code, output.read())


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of pytest ended."""

    code: int | None
    """None: its time was over."""
    output: str

    @property
    def failed(self) -> list[str]:
        """Tests, or files that could not be read."""
        return _FAILED.findall(self.output)

    @property
    def is_timeout(self) -> bool:
        """A test hung, or the machine was too busy for it."""
        return "from pytest-timeout" in self.output

    @property
    def is_well(self) -> bool:
        """Nothing failed; 5: nothing was selected."""
        return self.code in (0, 5)


@dataclass(slots=True)
class Result:
    """What became of one fault."""

    id: str
    status: str
    """`caught`, `caught (time)` where a test hung, `survived`, `survived (time)` where its own was over,
    `no longer applies`, `no tests`, or `red without it`."""
    first_failing: str = ""
    cpu_s: float = 0.0
    """Of pytest and all it started."""
    wall_s: float = 0.0


def try_mutant(trial: Trial, mutant: Mutant) -> Result:
    """Run a fault's tests path by path until one fails."""
    folder = trial.copy()
    paths = [path for path in mutant.tests if (folder / path).exists()]
    if not mutant.apply(folder):
        return Result(mutant.id, "no longer applies")
    if not paths:
        return Result(mutant.id, "no tests")
    kernels = "changed-kernels" if mutant.is_compiled(folder) else "kernels"
    shutil.rmtree(trial.home / "changed-kernels", ignore_errors=True)
    start_s, start_cpu_s = time.monotonic(), _cpu_s()
    found = Result(mutant.id, "survived")
    for number, path in enumerate(paths):
        left_s = trial.limit_s - (_cpu_s() - start_cpu_s)
        seen = [f"--ignore={before}" for before in paths[:number]]
        outcome = trial.pytest(folder, ["-x", path, *seen], limit_s=left_s, kernels=kernels)
        if outcome.code is None:
            found.status = "survived (time)"
            break
        if not outcome.is_well:
            found.status = "caught (time)" if outcome.is_timeout else "caught"
            last = (outcome.output.strip().splitlines() or [""])[-1]
            found.first_failing = next(iter(outcome.failed), f"{path}: pytest ended with {outcome.code}: {last}")
            break
    found.wall_s, found.cpu_s = round(time.monotonic() - start_s, 1), round(_cpu_s() - start_cpu_s, 1)
    return found


def red_without(trial: Trial, tests: Sequence[str]) -> set[str]:
    """Those of the tests that fail on the tree as it is."""
    return set(trial.pytest(trial.copy(), [*tests], limit_s=3600).failed)


def check_import(trial: Trial) -> None:
    """Children of children import the copy, also where the working directory is left out.

    Raises:
        RuntimeError: they import the checkout.
    """
    folder = trial.copy()
    code = "import dflop, subprocess, sys; print(dflop.__file__, flush=True); subprocess.run(sys.argv[1:] or ['true'])"
    words = [sys.executable, "-P", "-c", code]
    env = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run([*words, *words], cwd="/", env=env, capture_output=True, text=True, check=True)
    if done.stdout.splitlines() != [str(folder / "dflop" / "__init__.py")] * 2:
        raise RuntimeError(f"not the copy is imported but {done.stdout}")


def _started() -> set[psutil.Process]:
    """Live processes that pytest and what it runs have started."""
    return processes_where(lambda process: process.environ().get(_VARIABLE) == str(os.getpid()))


def _used_s(processes: set[psutil.Process]) -> float:
    """Processor time of processes and of their children that have ended."""
    ticks = 0
    for process in processes:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _cpu_s() -> float:
    """Of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
