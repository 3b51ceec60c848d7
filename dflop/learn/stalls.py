"""Ranks that are held up: time passes in their work while their own processor clock stands still.

On a CPU a rank's compute seconds are its thread's. They say nothing of a rank whose process is stopped, throttled, or
shares its core with somebody: only the clock on the wall does. That clock is noisy where a step is short, so what is
taken from it is one number per rank, the median of some steps, next to the usual rank's. Where ranks share cores by
plan, the simulator accounts for it, and nothing is read here; with a GPU both clocks are the same.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from dflop.records import BUSY_RATIO
from dflop.train.wire import RankTimes

NUM_STEPS = 7
"""Whose median counts: a rank has to be held up in most of them."""
LEAST = 1.1
"""A rank that takes less than this multiple of what the usual one does is not held up."""


class Stalls:
    """By how much more time passes for ranks than for the usual one, per compute second."""

    def __init__(self) -> None:
        self._stretches: dict[int, deque[float]] = {}
        self._was_busy = False

    def observe(self, seen: Sequence[RankTimes]) -> None:
        """Take in what ranks measured of a step."""
        for times in seen:
            self._stretches.setdefault(times.rank, deque(maxlen=NUM_STEPS)).append(times.stretch)

    def factors(self) -> dict[int, float]:
        """What compute seconds of ranks are to be multiplied with; only those that are held up, step after step."""
        medians = self._medians()
        usual = statistics.median_low(medians.values()) if medians else 1.0
        return {rank: median / usual for rank, median in medians.items() if median / usual >= LEAST}

    def newly_busy(self) -> float:
        """The usual rank's wall over compute time if other work has begun to use the cores, once; else 0."""
        medians = self._medians()
        usual = statistics.median_low(medians.values()) if medians else 1.0
        is_news = usual > BUSY_RATIO and not self._was_busy
        self._was_busy |= is_news
        return usual if is_news else 0.0

    def _medians(self) -> dict[int, float]:
        """Per rank with enough steps."""
        found = self._stretches.items()
        return {rank: statistics.median(of_rank) for rank, of_rank in found if len(of_rank) >= NUM_STEPS // 2}
