"""Rank 0's side of the scheduler process: starts it, notices its death, starts it again, and in the end gives up on it.

Everything here is counted in steps: a restart is due some steps after a death, four times as many after each, so that
a scheduler that cannot live costs the job a few process starts and nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dflop.launch.kernels import kernel_environment

PARENT = "DFLOP_RANK0_PID"
"""Variable with the process that started this one, set by it."""
_PR_SET_PDEATHSIG = 1
SCHEDULER_MODULE = "dflop.jobs.scheduler"
BACKOFF_STEPS = 4
"""The nth restart waits this to the power of n - 1 steps."""
EXIT_S = 10.0
FAILED_EXIT_S = 1.0
"""The launcher ends all of a failed job two seconds after its first process."""

EventHandler = Callable[[int, str, str], None]
"""(step, kind of `RunEvent`, detail)."""


class Supervisor:
    """The scheduler process of one job; starts it at once, with `args` and the number of the start.

    `is_alive` may be asked by any thread; the rest is for the main thread, whose death ends the scheduler. Output of
    later starts goes below that of earlier ones.
    """

    def __init__(self, args: Sequence[str], log: Path, *, num_steps: int, max_restarts: int) -> None:
        self._args, self._log, self._num_steps, self._max_restarts = args, log, num_steps, max_restarts
        self._num_starts = 0
        self._due_step: float | None = None
        """Step of the next start; infinity: the supervisor gave up."""
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether it runs; it does to the end of the job unless something has gone wrong."""
        return self._process.poll() is None

    def tend(self, step: int, on_event: EventHandler) -> None:
        """Look after it once `step` is over."""
        if self.is_alive() or step + 2 >= self._num_steps:
            return  # in the end, too: the last plan is asked for before the last step but one is over
        if self._due_step is None:
            code = self._process.returncode
            how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            on_event(step, "scheduler_dead", f"it {how}, see {self._log}")
            self._due_step = step + BACKOFF_STEPS ** (self._num_starts - 1)
            if self._num_starts > self._max_restarts:
                self._give_up(step, f"failed {self._num_starts} times", on_event)
        elif step >= self._due_step:
            try:
                self._process, self._due_step = self._start(), None
            except OSError as error:  # no memory or no processes left: training must not end of it
                self._give_up(step, f"cannot be started: {error}", on_event)
            else:
                on_event(step, "scheduler_restarted", f"restart {self._num_starts - 1} of {self._max_restarts}")

    def stop(self, *, at_once: bool = False) -> None:
        """Let it end, or make it end; it flushes what it has either way."""
        if at_once:
            self._process.terminate()
        try:
            self._process.wait(FAILED_EXIT_S if at_once else EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # what it flushes nobody else needs to write
                self._process.wait(FAILED_EXIT_S)

    def _give_up(self, step: int, why: str, on_event: EventHandler) -> None:
        self._due_step = math.inf
        on_event(step, "scheduler_given_up", f"{why}; training continues with the fallback schedule")

    def _start(self) -> subprocess.Popen[bytes]:
        self._num_starts += 1
        command = [sys.executable, "-P", "-m", SCHEDULER_MODULE, *self._args, str(self._num_starts)]
        env = os.environ | kernel_environment(os.environ) | {PARENT: str(os.getpid())}
        # Slurm sends its warning to every process of a task. This one must live until rank 0 has acted on it, and
        # inherits what is blocked here.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        try:
            with open(self._log, "ab") as out:
                return subprocess.Popen(command, env=env, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def die_with_parent() -> None:
    """End on SIGTERM by way of `finally`, so that the spool is flushed, and get one when rank 0 dies.

    Raises:
        SystemExit: it has died already, while this process was importing.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):
            raise SystemExit("scheduler: rank 0 exited before the first step")
