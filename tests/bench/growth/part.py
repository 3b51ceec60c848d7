"""What grows: a part of dflop, what its work is counted in, and how steeply time and memory may rise with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Work = Callable[[], object]
Prepare = Callable[[int, Path], Work]

TOLERANCE = 0.1
"""By which a measured exponent may exceed its bound: repeats of one part differ by about as much."""
LEAST_BYTES = 16 << 20
"""A peak below it is mostly pages that an allocator holds in any case; no exponent is made of it."""
LEAST_PEAK = 1 << 20
"""A smaller one counts as this much."""


@dataclass(frozen=True, slots=True)
class Part:
    """Something that is done to more or less of something."""

    name: str
    """`<what is done> by <what there is more of>`."""
    sizes: tuple[int, ...]
    """Ascending, ten times as many each time; the last one in a full run only, where there are three."""
    prepare: Prepare
    """From a size and an empty folder to the work that is measured; what prepares it is not."""
    bound: float
    """Of the exponent of seconds."""
    why: str
    """Of the bound."""
    memory_bound: float = 1.0
    """Of the exponent of peak bytes."""
    is_once: bool = False
    """Whether the work changes what it works on, so that it is prepared anew for every repeat."""


@dataclass(frozen=True, slots=True)
class Point:
    """One part at one size."""

    size: int
    cpu_s: float
    """Processor seconds of all threads, best of some repeats: other processes and the disk change little in them."""
    wall_s: float
    """Best of the same repeats."""
    peak_bytes: int
    """Resident memory that the first of them added at most."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How a part grew."""

    name: str
    why: str
    bound: float
    memory_bound: float
    points: tuple[Point, ...]
    problem: str = ""
    """What kept a size from being measured."""

    @property
    def exponent(self) -> float | None:
        """Of processor seconds, between the two largest sizes: fixed costs rule the small ones."""
        return exponent([p.size for p in self.points], [p.cpu_s for p in self.points])

    @property
    def memory_exponent(self) -> float | None:
        """Of peak bytes, between the two largest sizes; None where the largest peak is too small to tell."""
        peaks = [max(p.peak_bytes, LEAST_PEAK) for p in self.points]
        if not peaks or peaks[-1] < LEAST_BYTES:
            return None
        return exponent([p.size for p in self.points], peaks)

    @property
    def excess(self) -> float:
        """By how much the worse of both exponents exceeds its bound; negative below it, -inf where there is none."""
        pairs = ((self.exponent, self.bound), (self.memory_exponent, self.memory_bound))
        return max((found - bound for found, bound in pairs if found is not None), default=-math.inf)

    @property
    def is_above(self) -> bool:
        """Whether it grows faster than it should."""
        return self.excess > TOLERANCE


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float | None:
    """`e` of `value ~ size ** e` between the last two points; None with fewer, or where a value is not positive."""
    if len(sizes) < 2 or values[-1] <= 0 or values[-2] <= 0:
        return None
    return math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2])
