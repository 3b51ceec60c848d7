"""A claim of the paper beside what was found here: figures with their spread, a verdict, and where it falls short.

Nobody writes a verdict. An `Expectation` holds a figure against a bound, together with the reason to give where it
falls short; which reason that is, the module of a claim chooses from its numbers. No shortfall, no text.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

Basis = Literal["measured", "simulated", "forecast", "measured over simulated"]
Unit = Literal["x", "%", "s", ""]
REACHED, WITHIN_SPREAD, IN_PART, MISSED, UNKNOWN = (
    "reached",
    "within the spread",
    "in part",
    "not reached",
    "not tested",
)


@dataclass(frozen=True, slots=True)
class Reading:
    """One figure of ours, a value per seed."""

    what: str
    values: tuple[float, ...]
    unit: Unit
    basis: Basis

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def text(self) -> str:
        """Mean, and the least and the largest value where there are several."""
        if not self.values:
            return f"{self.what}: none"
        told = [shown(self.mean, self.unit)]
        if len(self.values) > 1:
            told.append(f"({shown(min(self.values), self.unit)} to {shown(max(self.values), self.unit)})")
        return f"{self.what}: {' '.join(told)}"


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a reading ought to be."""

    reading: Reading
    relation: Literal[">=", "<="]
    bound: float
    reason: str
    """Why it falls short, where it does."""

    @property
    def num_met(self) -> int:
        """Seeds that meet it."""
        sign = 1 if self.relation == ">=" else -1
        return sum(sign * value >= sign * self.bound for value in self.reading.values)

    @property
    def is_met(self) -> bool:
        sign = 1 if self.relation == ">=" else -1
        return bool(self.reading.values) and sign * self.reading.mean >= sign * self.bound

    @property
    def shortfall(self) -> str:
        """In words; empty where it is met with every seed."""
        if not self.reading.values:
            return f"{self.reading.what}: nothing was found; {self.reason}"
        wanted = f"{'at least' if self.relation == '>=' else 'at most'} {shown(self.bound, self.reading.unit)}"
        if not self.is_met:
            return f"{self.reading.text}, wanted {wanted}: {self.reason}"
        if self.num_met < len(self.reading.values):
            missed = len(self.reading.values) - self.num_met
            return f"{self.reading.text}, wanted {wanted}: missed with {missed} of {len(self.reading.values)} seeds"
        return ""


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim of the paper."""

    name: str
    claim: str
    how: str
    """How it was tested, in a sentence or two."""
    paper: str
    """Its figure. Secondary: from public summaries of the paper, which was not read."""
    readings: tuple[Reading, ...]
    expectations: tuple[Expectation, ...]
    notes: tuple[str, ...] = ()
    """What else the numbers say, computed as they are."""
    details: tuple[dict[str, Any], ...] = field(default=())
    """Rows of the table of details; the same keys in each."""

    @property
    def basis(self) -> str:
        """How the figures came about."""
        return ", ".join(dict.fromkeys(r.basis for r in self.readings))

    @property
    def verdict(self) -> str:
        met = [e.is_met for e in self.expectations]
        if not met or not any(r.values for r in self.readings):
            return UNKNOWN
        if all(met):
            return WITHIN_SPREAD if any(e.shortfall for e in self.expectations) else REACHED
        return IN_PART if any(met) else MISSED

    @property
    def worse(self) -> str:
        """Where we are worse than the paper, and why; empty where we are not."""
        return "; ".join(e.shortfall for e in self.expectations if e.shortfall)

    def to_json(self) -> dict[str, Any]:
        content = {key: value for key, value in asdict(self).items() if key != "expectations"}
        tested = [
            {**asdict(e), "reading": e.reading.what, "is_met": e.is_met, "num_met": e.num_met}
            for e in self.expectations
        ]
        found: dict[str, Any] = plain({
            **content, "expectations": tested, "basis": self.basis, "verdict": self.verdict, "worse": self.worse,
            "ours": [reading.text for reading in self.readings],
        })  # fmt: skip
        return found


def plain(value: Any) -> Any:
    """For JSON, which has no NaN and knows no numbers of numpy's."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shown(value: float, unit: Unit) -> str:
    """A value for people."""
    if math.isnan(value):
        return "none"
    if unit == "x":
        return f"{value:.2f}x"
    if unit == "%":
        return f"{100 * value:.2g} %" if abs(value) < 0.1 else f"{100 * value:.0f} %"
    if unit == "s":
        return f"{value:.3g} s" if value < 999.5 else f"{value:.0f} s"
    return f"{value:.3g}"


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers; NaN of none."""
    return math.exp(statistics.fmean(math.log(v) for v in values)) if values else math.nan


def by_seed(found: Sequence[tuple[int, float]]) -> tuple[float, ...]:
    """Geometric mean of the values of every seed, in the order of the seeds."""
    seeds = sorted({seed for seed, _ in found})
    return tuple(geometric_mean([value for s, value in found if s == seed]) for seed in seeds)
