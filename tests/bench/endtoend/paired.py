"""What is said of two ways to train the same global batches, from the step times of several seeds.

Batches differ far more from one another than the ways do, so steps are paired by batch before anything is averaged, and
averaged as logarithms. The steps of one seed share weights, plan, processes and the minutes they ran in: they are one
observation. Hence the interval is over seeds, however many steps each has.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """Geometric mean over seeds with its 95 % interval."""

    mean: float
    low: float | None
    """None where one seed, which has no spread, is all there is."""
    high: float | None
    num_seeds: int

    @property
    def is_conclusive(self) -> bool:
        """Whether there is an interval and it leaves 1 out."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high


def seed_ratio(slower_s: Sequence[float], faster_s: Sequence[float]) -> float:
    """Geometric mean over global batches of the ratio of their two step times.

    Raises:
        ValueError: not as many steps of the one as of the other, or none.
    """
    return math.exp(statistics.fmean(math.log(a / b) for a, b in zip(slower_s, faster_s, strict=True)))


def over_seeds(ratios: Sequence[float]) -> Ratio:
    """Student's interval of the mean logarithm, one ratio per seed.

    Raises:
        ValueError: there are none.
    """
    logs = [math.log(r) for r in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(mean), None, None, len(logs))
    half = float(stdtrit(len(logs) - 1, 0.5 + CONFIDENCE / 2)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def break_even_steps(setup_s: float, slower_step_s: float, faster_step_s: float) -> int | None:
    """Steps after which what was spent before training is saved again; None: never."""
    saved_s = slower_step_s - faster_step_s
    return math.ceil(setup_s / saved_s) if saved_s > 0 else None


def relative_error(losses: Sequence[float], others: Sequence[float]) -> float:
    """Largest difference of two runs' losses, step by step, relative to the first run's; NaN if any of them is."""
    return float(np.max([abs(b / a - 1) for a, b in zip(losses, others, strict=True)]))
