"""The one door to numba: compiled where it is there, the same functions as plain Python where it is not.

A trainer's environment may hold a numpy that its numba refuses, or no numba at all. Then the kernels give the same
results, a hundred times slower; callers look at `IS_COMPILED` and leave out what only pays when it is fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    from numba import config, njit

    IS_COMPILED = not getattr(config, "DISABLE_JIT", False)
except ImportError:  # not installed, or it refuses this numpy
    IS_COMPILED = False


def kernel(function: Callable[..., Any]) -> Any:
    """Compiled at its first call, kept on disk, free of the interpreter lock; callers say what it returns."""
    return njit(cache=True, nogil=True)(function) if IS_COMPILED else function


def inlined(function: Callable[..., Any]) -> Any:
    """A kernel that becomes part of those that call it: calls with many arrays cost more than what small ones do."""
    return njit(cache=True, nogil=True, forceinline=True)(function) if IS_COMPILED else function
