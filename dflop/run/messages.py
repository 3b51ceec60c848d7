"""Lines for people: who is told, and the one way to tell whoever reads stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable

from dflop.errors import printable, redacted

Say = Callable[[str], None]
"""Told what happens, a line at a time."""


def say(line: str) -> None:
    """A line on stderr, which is the log of a job and the terminal of a command; stdout is for data.

    Secrets are blacked out and control characters shown: a line may hold a name from somebody's dataset or environment.
    """
    print(printable(redacted(line)), file=sys.stderr, flush=True)
