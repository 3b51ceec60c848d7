"""`dflop` that kills itself at an exact place: `python -m tests.chaos.dying PLACE ARGS...`.

PLACE is `module:function:when:nth`, before or behind the n-th call: `dflop.store.ingest:_verify:before:2`.
What a kill from outside would hit once in ten thousand times is hit each time. Its last words say that it got there.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from tests.chaos.fault import End

LAST_WORDS = "died by itself at "
DIED = (End(-signal.SIGKILL, LAST_WORDS),)


def arm(place: str) -> None:
    """Replace the function by one that ends this process.

    Raises:
        AttributeError: there is no such function.
        ValueError: `place` is not of that form.
    """
    module_name, path, when, nth = place.split(":")
    if when not in ("before", "behind"):
        raise ValueError(f"`{when}` is neither before nor behind")
    owner: Any = importlib.import_module(module_name)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    setattr(owner, name, _dying(getattr(owner, name), when == "before", int(nth), f"{LAST_WORDS}{place}\n"))


def _dying(function: Callable[..., Any], is_before: bool, nth: int, words: str) -> Callable[..., Any]:
    num_calls = 0

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if is_before and num_calls == nth:
            _die(words)
        found = function(*args, **options)
        if num_calls == nth:
            _die(words)
        return found

    return wrapped


def _die(words: str) -> None:
    os.write(2, words.encode())  # nothing that is buffered, or wraps it, is written out any more
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    arm(sys.argv.pop(1))
    from dflop.cli import main

    main()
