"""Lines for people: who is told, and the one way to tell whoever reads stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from dflop.errors import printable, redacted

Say = Callable[[str], None]
"""Told what happens, a line at a time."""


def say(line: str) -> None:
    """A line on stderr, with secrets blacked out and control characters shown: names come from anybody's dataset."""
    with contextlib.suppress(OSError):  # a terminal that was closed ends no driver
        print(printable(redacted(line)), file=sys.stderr, flush=True)
