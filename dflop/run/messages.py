"""Lines for people: their type, the one way to print them on stderr, and how far work is."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import time
from collections.abc import Callable

from dflop.errors import printable, redacted
from dflop.units import seconds

Say = Callable[[str], None]
"""Receives what happens, a line at a time."""
MIN_TOLD_S, MIN_TOLD_FRAC = 5.0, 0.1
"""Between two lines on how far something is."""
MIN_DRAWN_S = 0.1
"""Between two changes of a terminal's line."""
PROGRESS_LINE = re.compile(r".+: (\d+) of ([1-9]\d*) \(\d+%\), ")
"""What a `Meter` says in a log."""
_CLEARED = "\r\x1b[K"


def say(line: str) -> None:
    """A line on stderr, with secrets blacked out and control characters shown: names come from anybody's dataset."""
    with contextlib.suppress(OSError):  # a terminal that was closed ends no driver
        print(f"{_CLEARED * sys.stderr.isatty()}{printable(redacted(line))}", file=sys.stderr, flush=True)


_TO_STDERR = say


class Meter:
    """Reports how far work is, with the time to go; an `At` of `progress.py`.

    A terminal has one line that changes, below what else is said; a log has a line per 10 %, and none of what is over
    in a moment.
    """

    def __init__(
        self, say: Say, *, clock: Callable[[], float] = time.monotonic, is_terminal: bool | None = None
    ) -> None:
        """`say` receives the lines of a log; `clock` counts seconds; `is_terminal` is what stderr is, None: asked."""
        self.is_drawn = (say is _TO_STDERR and sys.stderr.isatty()) if is_terminal is None else is_terminal
        self._say, self._clock = say, clock
        self._what, self._began_s, self._told_frac, self._told_s = "", 0.0, 0.0, 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now_s = self._clock()
        if not done or what != self._what:
            self._what, self._began_s, self._told_frac = what, now_s, 0.0
            self._told_s = now_s - MIN_DRAWN_S * self.is_drawn
        if not done:
            return
        frac, took_s, since_s = done / total, now_s - self._began_s, now_s - self._told_s
        left = f"{seconds(took_s * (1 / frac - 1))} to go" if done < total else f"took {seconds(took_s)}"
        line = f"{what}: {done} of {total} ({frac:.0%}), {left}"
        if self.is_drawn:
            if since_s >= MIN_DRAWN_S or done == total:
                shown = line[: shutil.get_terminal_size().columns - 1]
                with contextlib.suppress(OSError):
                    print(f"{_CLEARED}{shown}", end="\n" * (done == total), file=sys.stderr, flush=True)
                self._told_s = now_s
        elif frac - self._told_frac >= MIN_TOLD_FRAC - 1e-9 and since_s >= MIN_TOLD_S:
            self._say(line)
            self._told_frac, self._told_s = frac, now_s
