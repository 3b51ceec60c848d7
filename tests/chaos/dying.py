"""`dflop` that kills itself at an exact place: `python -m tests.chaos.dying PLACE ARGS...`.

PLACE is `module:function:when:nth`, before or behind the n-th call: `dflop.store.ingest:_verify:before:2`.
What a kill from outside would hit once in ten thousand times is hit each time. Its last words say that it got there.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import signal
import sys
from typing import Any

LAST_WORDS = "died by itself at "


def arm(place: str) -> None:
    """Replace the function by one that ends this process; `AttributeError` where there is none."""
    module_name, path, when, nth = place.split(":")
    assert when in ("before", "behind"), when
    owner: Any = importlib.import_module(module_name)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    function, calls = getattr(owner, name), itertools.count(1)

    @functools.wraps(function)
    def dying(*args: Any, **options: Any) -> Any:
        is_last = next(calls) == int(nth)
        if is_last and when == "before":
            _die(place)
        found = function(*args, **options)
        if is_last:
            _die(place)
        return found

    setattr(owner, name, dying)


def _die(place: str) -> None:
    os.write(2, f"{LAST_WORDS}{place}\n".encode())  # nothing that is buffered, or wraps it, is written out any more
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    arm(sys.argv.pop(1))
    from dflop.cli import main

    main()
