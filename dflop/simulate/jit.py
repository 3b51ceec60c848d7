"""The one door to numba.

Where something runs that has no time to load a compiler, as a rank that plans one step itself, numba is hidden while
kernels are imported (`dflop/jobs/fallback_plan.py`): the same functions then run as plain Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

IS_HIDDEN = "numba" in sys.modules and sys.modules["numba"] is None
if not IS_HIDDEN:
    from numba import njit


def kernel(function: Callable[..., Any]) -> Any:
    """Compiled at its first call, kept on disk, free of the interpreter lock; callers say what it returns."""
    return function if IS_HIDDEN else njit(cache=True, nogil=True)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """A kernel that becomes part of those that call it: calls with many arrays cost more than what small ones do."""
    return function if IS_HIDDEN else njit(cache=True, nogil=True, forceinline=True)(function)
