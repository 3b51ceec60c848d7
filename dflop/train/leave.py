"""How a process ends whose threads may still be waiting for ranks that have gone.

The interpreter would wait for some of them, and torch aborts when it finds others in the midst of a message, so that a
failed rank would look like one that was killed.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End the process now; what is buffered for a person is written."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def leave_at_exit(code: int) -> None:
    """End so as soon as the interpreter has nothing left to do, an exception printed or pickled."""
    atexit.register(leave, code)
