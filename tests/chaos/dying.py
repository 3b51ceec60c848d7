"""`dflop` that kills itself at an exact place: `python -m tests.chaos.dying PLACE ARGS...`.

PLACE is `module:function:when:nth`, before or behind the n-th call: `dflop.store.rollup:refresh:before:2`.
What a kill from outside would hit once in ten thousand times is hit each time. Its last words say that it got there.
"""

import functools
import itertools
import os
import pkgutil
import signal
import sys
from typing import Any
from unittest import mock

LAST_WORDS = "died by itself at "


def arm(place: str) -> None:
    """Replace the function by one that ends this process; `AttributeError` where there is none."""
    module, name, when, nth = place.split(":")
    assert when in ("before", "behind"), when
    function, calls = pkgutil.resolve_name(f"{module}:{name}"), itertools.count(1)

    @functools.wraps(function)
    def dying(*args: Any, **options: Any) -> Any:
        is_last = next(calls) == int(nth)
        found = None if is_last and when == "before" else function(*args, **options)
        if is_last:
            # Nothing that is buffered, or wraps it, is written out any more.
            os.write(2, f"{LAST_WORDS}{place}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    mock.patch(f"{module}.{name}", dying).start()


if __name__ == "__main__":
    arm(sys.argv.pop(1))
    from dflop.cli import main

    main()
