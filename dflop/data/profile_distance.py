"""How far apart two datasets are, in the quantities a plan was made from.

Per module the two distributions of tokens per sample are compared by the Kolmogorov-Smirnov distance (the largest
difference between their cumulative shares), and the shares of modality groups by total variation. Both lie in 0..1 and
need no bins or units. With each stands the distance that chance alone exceeds once in twenty draws of samples of
these sizes from one distribution; a drift is what lies beyond all chance *and* beyond a threshold, since with a million
samples differences that no plan would feel are significant too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from dflop.data.distribution import GROUPS, tokens_of
from dflop.errors import DataError

ALPHA = 0.05
"""How often chance may look like a drift, over all quantities together."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shift:
    """One quantity of two datasets."""

    quantity: str
    """`group`, or `<module>_tokens`."""
    distance: float
    """0: the same distribution; 1: nothing in common."""
    chance: float
    """Distance that two draws from one distribution rarely exceed."""
    mean_ratio: float
    """Mean after over mean before; NaN for groups, and where the mean before is 0."""


@dataclass(frozen=True, slots=True)
class Drift:
    """All quantities of two datasets, the farthest first."""

    shifts: tuple[Shift, ...]

    @property
    def distance(self) -> float:
        """Largest distance."""
        return self.shifts[0].distance

    def beyond(self, threshold: float) -> tuple[Shift, ...]:
        """Quantities that are farther apart than chance and than `threshold`."""
        return tuple(s for s in self.shifts if s.distance > max(threshold, s.chance))


def drift(before: pl.DataFrame, after: pl.DataFrame) -> Drift:
    """Compares two of `profile_frame`.

    Raises:
        DataError: one of them is empty.
    """
    if before.is_empty() or after.is_empty():
        raise DataError("a dataset without valid samples has no distribution to compare")
    tokens = tokens_of(before), tokens_of(after)
    modules = sorted({*tokens[0], *tokens[1]})
    weights = [frame["weight"].to_numpy() for frame in (before, after)]
    sizes = [w.sum() ** 2 / (w**2).sum() for w in weights]  # as many equal samples as say the same
    alpha = ALPHA / (len(modules) + 1)
    ks_chance = math.sqrt(-math.log(alpha / 2) / 2 * (1 / sizes[0] + 1 / sizes[1]))
    shifts = []
    for module in modules:
        # A module that one dataset has no work for takes 0 tokens of each of its samples.
        values = [of.get(module, np.zeros(len(w))).astype(np.float64) for of, w in zip(tokens, weights, strict=True)]
        distance = _kolmogorov_smirnov(values[0], values[1], *weights)
        means = [float(np.average(v, weights=w)) for v, w in zip(values, weights, strict=True)]
        shifts.append(
            Shift(f"{module}_tokens", distance, min(1.0, ks_chance), means[1] / means[0] if means[0] else math.nan)
        )
    shares = [np.array([w[(frame["group"] == g).to_numpy()].sum() for g in GROUPS]) / w.sum()
              for frame, w in zip((before, after), weights, strict=True)]  # fmt: skip
    tv_chance = math.sqrt((len(GROUPS) * math.log(2) - math.log(alpha)) / 2 * (1 / sizes[0] + 1 / sizes[1]))
    shifts.append(Shift("group", float(np.abs(shares[0] - shares[1]).sum() / 2), min(1.0, tv_chance), math.nan))
    return Drift(tuple(sorted(shifts, key=lambda s: -s.distance)))


def _kolmogorov_smirnov(a: Floats, b: Floats, a_weight: Floats, b_weight: Floats) -> float:
    points = np.unique(np.concatenate([a, b]))
    shares = []
    for values, weight in ((a, a_weight), (b, b_weight)):
        order = np.argsort(values, kind="stable")
        cumulative = np.concatenate([[0.0], np.cumsum(weight[order])]) / weight.sum()
        shares.append(cumulative[np.searchsorted(values[order], points, side="right")])
    return float(np.abs(shares[0] - shares[1]).max())
