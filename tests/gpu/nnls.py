"""Non-negative least squares without scipy, for machines that lack it (Lawson and Hanson, 1974, chapter 23)."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np


def nnls(features: Any, target: Any, maxiter: int = 1000) -> tuple[Any, float]:
    """`x >= 0` of least `|features @ x - target|`, and that norm, as `scipy.optimize.nnls`."""
    found, is_free = np.zeros(features.shape[1]), np.zeros(features.shape[1], dtype=bool)
    least = 1e-10 * max(1.0, float(np.abs(features.T @ target).max(initial=0.0)))
    for _ in range(maxiter):
        slope = np.where(is_free, -np.inf, features.T @ (target - features @ found))
        if is_free.all() or slope.max() <= least:
            break
        is_free[slope.argmax()] = True
        while True:
            best = np.zeros_like(found)
            best[is_free] = np.linalg.lstsq(features[:, is_free], target, rcond=None)[0]
            if not (out := is_free & (best <= 0)).any():
                break
            found = found + np.min(found[out] / (found[out] - best[out])) * (best - found)
            is_free &= found > 1e-12
        found = best
    return found, float(np.linalg.norm(features @ found - target))


def stand_in() -> None:
    """Let `from scipy.optimize import nnls` find it where there is no scipy."""
    try:
        import scipy.optimize  # noqa: F401  # only whether it is there
    except ImportError:
        made = sys.modules["scipy.optimize"] = ModuleType("scipy.optimize")
        made.nnls = nnls  # type: ignore[attr-defined]  # a module is made of what is set
