"""Cumulative sums that notice when the mean of a series has moved, many series side by side.

Each series comes standardised: mean 0 and standard deviation 1 while nothing has changed, or more where its values
agree with one another within a step but stray from step to step, which is learnt from successive differences, as those
stay small when the mean moves. A step adds what lies beyond the slack; what it adds is bounded, so that no single step,
however wild, can be an alarm. With the constants below, 50 two-sided series together stay silent for more than 10,000
steps (`tests/correct/test_drift_detector.py`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SLACK = 0.75
"""Standard deviations per step that count as chance."""
THRESHOLD = 10.0
"""A sum beyond it is an alarm."""
MOST_PER_STEP = 2.5
"""So an alarm takes four steps at least."""
SCALE_RATE = 0.1
WILD = 9.0
"""A squared difference counts as at most so many times the usual."""
WORTH_KNOWING = 0.2
"""A shift, in the unit of the series, that is worth an alarm; half of it counts as chance, however exact the series."""


class Cusum:
    """Two-sided charts of several series.

    Args:
        num_series: Series.
    """

    def __init__(self, num_series: int) -> None:
        self._sums = np.zeros((2, num_series))  # of rises, of falls
        self._variance = np.ones(num_series)
        self._last = np.full(num_series, np.nan)
        self._shifts: list[list[float]] = [[] for _ in range(num_series)]

    def observe(self, scores: Floats, signals: Floats) -> None:
        """Take in one step.

        Args:
            scores: `[series]`, standardised; NaN where the step says nothing about a series.
            signals: `[series]`, what a score would be if the mean had moved by one unit; half of what a shift that is
                worth knowing would give is slack, too.
        """
        is_known = np.isfinite(scores) & (signals > 0)
        scores = np.where(is_known, scores, 0.0)
        self._learn_scale(scores, is_known)
        scale = np.sqrt(np.maximum(self._variance, 1.0))
        slack = np.maximum(SLACK, signals * WORTH_KNOWING / 2 / scale)
        steps = np.stack([scores, -scores]) / scale - slack
        self._sums = np.where(is_known, np.maximum(0.0, self._sums + np.minimum(steps, MOST_PER_STEP)), self._sums)
        for i in np.flatnonzero(is_known):
            if self._sums[:, i].max() == 0.0:
                self._shifts[i].clear()
            else:
                self._shifts[i].append(float(scores[i] / signals[i]))

    def alarm(self) -> int | None:
        """The series that is furthest beyond the threshold, if any is."""
        sums = self._sums.max(axis=0, initial=0.0)
        return int(np.argmax(sums)) if sums.size and sums.max() > THRESHOLD else None

    def shift(self, series: int) -> tuple[float, int]:
        """(by how much its mean has moved, steps since it has), robust against single wild steps."""
        since = self._shifts[series]
        return float(np.median(since)) if since else 0.0, len(since)

    def reset(self) -> None:
        """Forget all sums; what is known of the noise stays."""
        self._sums[:] = 0.0
        for shifts in self._shifts:
            shifts.clear()

    def _learn_scale(self, scores: Floats, is_known: npt.NDArray[np.bool_]) -> None:
        squared = np.minimum((scores - self._last) ** 2 / 2, WILD * self._variance)
        is_new = is_known & np.isfinite(self._last)
        self._variance = np.where(is_new, self._variance + SCALE_RATE * (squared - self._variance), self._variance)
        self._last = np.where(is_known, scores, self._last)
