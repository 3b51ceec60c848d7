"""The one door to numba.

Where numba is not installed, as next to the sampler alone, or hidden while kernels are imported, since a rank that
plans a step itself has no time to load a compiler (`dflop/jobs/fallback_plan.py`), the same functions run as plain
Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    from numba import njit
except ModuleNotFoundError:  # also what the import system raises for what is hidden
    IS_COMPILED = False
else:
    IS_COMPILED = True


def kernel(function: Callable[..., Any]) -> Any:
    """Compiled at its first call, kept on disk, free of the interpreter lock; callers say what it returns."""
    return njit(cache=True, nogil=True)(function) if IS_COMPILED else function


def inlined(function: Callable[..., Any]) -> Any:
    """A kernel that becomes part of those that call it: calls with many arrays cost more than what small ones do."""
    return njit(cache=True, nogil=True, forceinline=True)(function) if IS_COMPILED else function
