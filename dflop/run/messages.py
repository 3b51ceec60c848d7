"""Lines for people: who is told, and the one way to tell whoever reads stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from dflop.errors import printable, redacted
from dflop.units import seconds

T = TypeVar("T")
Say = Callable[[str], None]
"""Told what happens, a line at a time."""
MIN_TOLD_S = 5.0
"""Between two lines on how far something is."""


def say(line: str) -> None:
    """A line on stderr, with secrets blacked out and control characters shown: names come from anybody's dataset."""
    with contextlib.suppress(OSError):  # a terminal that was closed ends no driver
        print(printable(redacted(line)), file=sys.stderr, flush=True)


_TO_STDERR = say


def progress(
    items: Sequence[T],
    what: str,
    say: Say,
    *,
    clock: Callable[[], float] = time.monotonic,
    is_terminal: bool | None = None,
) -> Iterator[T]:
    """The items, one after the other, and how far it is with the time to go.

    A terminal has one line that changes; a log has a line per 10 %, and none of what is over in a moment.

    Args:
        items: To go through, each about as long as the others.
        what: Is done to them, as in `simulating plans`.
        say: Told the lines of a log.
        clock: Seconds.
        is_terminal: Whether stderr is one; None: asked.
    """
    shows = (say is _TO_STDERR and sys.stderr.isatty()) if is_terminal is None else is_terminal
    began_s, told_frac, told_s = clock(), 0.0, clock()
    for number, item in enumerate(items):
        yield item
        done, now_s = (number + 1) / len(items), clock()
        left = (
            f"{seconds((now_s - began_s) * (1 / done - 1))} to go" if done < 1 else f"took {seconds(now_s - began_s)}"
        )
        line = f"{what}: {number + 1} of {len(items)} ({done:.0%}), {left}"
        if shows:
            print(f"\r\x1b[K{line}", end="\n" * (done == 1), file=sys.stderr, flush=True)
        elif done - told_frac >= 0.1 - 1e-9 and now_s - told_s >= MIN_TOLD_S:
            say(line)
            told_frac, told_s = done, now_s
