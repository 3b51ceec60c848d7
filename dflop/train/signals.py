"""A signal that tells a job to stop is noted at once and obeyed between two steps, by all ranks together.

Slurm sends SIGUSR2 some time before a limit and SIGTERM with scancel, torchrun hands SIGTERM on to its workers, a
person may send either to one rank. Whoever gets one raises a flag that the ranks sum in the step's last all-reduce
(`GradientReducer.totals`), so that all of them stop after the same step, with one checkpoint.

A process whose threads may still be waiting for ranks that have gone ends by `leave`: the interpreter would wait for
some of them, and torch aborts when it finds others in the midst of a message, so that a failed rank would look like one
that was killed.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)


class StopRequest:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None

    def is_set(self) -> bool:
        """True from the first of the signals on; later ones change nothing."""
        return self._signal is not None

    def listen(self) -> None:
        """Take the signals from whoever handled them: submitit would end rank 0 on SIGUSR2 and ignore SIGTERM.

        Python lets only the main thread do so; a job that somebody runs in another one cannot be told to stop.
        """
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                signal.signal(number, self._note)
            # A local job is started with them blocked, so that none is lost before this.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def ignore(self) -> None:
        """Let further signals change nothing: Python gives up its handlers before it ends, and one would kill it then.

        For a process that was told, or has done all it had to do.
        """
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._signal is None:
            self._signal = signal.Signals(number)
            # Not print: the signal may have come in the middle of one.
            os.write(2, f"{self._signal.name}: stopping after the current step, with a checkpoint\n".encode())
        self.ignore()


def leave(code: int) -> NoReturn:
    """End the process now; what is buffered for a person is written."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def leave_at_exit(code: int) -> None:
    """End so as soon as the interpreter has nothing left to do, an exception printed or pickled."""
    atexit.register(leave, code)
