"""How many times faster, over batches that both sides took, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIN_BATCHES = 3
"""Below, two ratios say nothing of the spread of others."""


@dataclass(frozen=True, slots=True)
class Speedup:
    """Geometric mean over batches of baseline / ours, with its 95 % interval.

    A run's own is a row of the view `v_speedup`; `speedup` computes it of simulated steps, which are in no store.
    """

    mean: float
    """NaN without batches."""
    low: float
    """NaN below `MIN_BATCHES` batches."""
    high: float
    num_batches: int

    @property
    def has_interval(self) -> bool:
        return not math.isnan(self.low)

    @property
    def is_conclusive(self) -> bool:
        """Whether the interval exists and leaves 1 out."""
        return self.low > 1.0 or self.high < 1.0


NOT_COMPARED = Speedup(math.nan, math.nan, math.nan, 0)


def speedup(baseline_s: Sequence[float], ours_s: Sequence[float]) -> Speedup:
    """Paired by batch, which differ more than sides do; the interval is Student's, on logarithms.

    Args:
        baseline_s: Per batch, seconds, positive.
        ours_s: Of the same batches.
    """
    logs = [math.log(b / o) for b, o in zip(baseline_s, ours_s, strict=True)]
    if not logs:
        return NOT_COMPARED
    mean = statistics.fmean(logs)
    if len(logs) < MIN_BATCHES:
        return Speedup(math.exp(mean), math.nan, math.nan, len(logs))
    half = _student_95(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Speedup(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def _student_95(num_degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t, from 2 degrees on, within 0.3 % (Cornish-Fisher from 4 on)."""
    n = num_degrees
    return {2: 4.302653, 3: 3.182446}.get(n, 1.959964 + 2.372271 / n + 2.822499 / n**2 + 2.555850 / n**3)
