"""`dflop` that kills itself at an exact place: `python -m tests.chaos.dying PLACE ARGS...`.

PLACE is `module:function:when:nth`, before or behind the n-th call: `dflop.store.ingest:_verify:before:2`.
What a kill from outside would hit once in ten thousand times is hit each time.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any


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
    setattr(owner, name, _dying(getattr(owner, name), when == "before", int(nth)))


def _dying(function: Callable[..., Any], is_before: bool, nth: int) -> Callable[..., Any]:
    num_calls = 0

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if is_before and num_calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        found = function(*args, **options)
        if num_calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    return wrapped


if __name__ == "__main__":
    arm(sys.argv.pop(1))
    from dflop.cli import main

    main()
