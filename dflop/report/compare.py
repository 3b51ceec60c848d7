"""Did balancing help? The same global batches, trained in arrival order and balanced, side by side.

Batches differ far more from one another than the policies do, so steps are paired by global batch before anything is
averaged. The speedup is the geometric mean of the per-batch ratios (the arithmetic mean would favour whichever policy
is in the denominator). Its 95 % interval is a two-level bootstrap, over batches and over the repeats of each batch;
with fewer than 3 batches there is none, and no winner is named.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflop import units
from dflop.records import StepPlan
from dflop.report.steps import MeasuredStep

ARRIVAL, BALANCED = "arrival", "balanced"
MIN_BATCHES = 3
NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """Comparison steps of one policy, all batches together."""

    policy: str
    num_steps: int
    step_s: float
    """Median, measured."""
    step_q1_s: float
    step_q3_s: float
    pipeline_s: float
    """Median, measured, forward and backward only: the counterpart of `predicted_step_s`."""
    predicted_step_s: float
    """Median, simulated."""
    idle_frac: float
    """Mean, measured."""


@dataclass(frozen=True, slots=True)
class BatchPair:
    """The steps of one global batch under both policies, at least one each."""

    sample_index: tuple[int, ...]
    arrival: tuple[MeasuredStep, ...]
    balanced: tuple[MeasuredStep, ...]

    @property
    def speedup(self) -> float:
        """Measured arrival / balanced, medians over repeats."""
        return statistics.median(s.step_s for s in self.arrival) / statistics.median(s.step_s for s in self.balanced)

    @property
    def predicted_speedup(self) -> float:
        """Simulated arrival / balanced; NaN when a prediction is missing."""
        arrival, balanced = (
            statistics.median(s.predicted_step_s for s in side) for side in (self.arrival, self.balanced)
        )
        return arrival / balanced if arrival > 0 and balanced > 0 else math.nan

    def typical(self) -> tuple[MeasuredStep, MeasuredStep]:
        """The arrival and the balanced step nearest to their medians."""
        return _nearest_median(self.arrival), _nearest_median(self.balanced)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the comparison job measured, warm-up left out."""

    policies: tuple[PolicyStats, ...]
    """`arrival`, `balanced`; a policy without steps is absent."""
    pairs: tuple[BatchPair, ...]
    speedup: float
    """Arrival / balanced step time, above 1 when balancing helped; NaN without pairs."""
    speedup_low: float
    """Lower end of the 95 % interval; NaN below `MIN_BATCHES` batches."""
    speedup_high: float
    predicted_speedup: float

    @property
    def is_conclusive(self) -> bool:
        """Whether the interval exists and leaves 1 out."""
        return self.speedup_low > 1.0 or self.speedup_high < 1.0

    def typical_pair(self) -> BatchPair | None:
        """The batch of median speedup (not the best one), to show as an example."""
        ranked = sorted(self.pairs, key=lambda p: (p.speedup, p.sample_index))
        return ranked[(len(ranked) - 1) // 2] if ranked else None


def compare_policies(steps: Sequence[MeasuredStep], plans: Sequence[StepPlan]) -> Comparison | None:
    """Comparison of the two policies; None when neither has a step.

    Args:
        steps: Of the comparison job, warm-up included (it is left out here).
        plans: Step plans of the same job; a step without one cannot be paired.
    """
    policies = tuple(_stats(p, [s for s in steps if s.policy == p]) for p in (ARRIVAL, BALANCED))
    policies = tuple(p for p in policies if p.num_steps)
    if not policies:
        return None
    pairs = _pair(steps, plans)
    low, high = _interval(pairs)
    return Comparison(
        policies=policies,
        pairs=pairs,
        speedup=_geometric_mean([p.speedup for p in pairs]),
        speedup_low=low,
        speedup_high=high,
        predicted_speedup=_geometric_mean([p.predicted_speedup for p in pairs]),
    )


def verdict(comparison: Comparison | None, *, num_processes: int, num_cores: int | None) -> str:
    """One or two plain sentences: who won, by how much, and whether that is more than noise.

    Args:
        comparison: None when the run compared nothing.
        num_processes: Of the plan.
        num_cores: Cores they share; None when every process has a device of its own.
    """
    sentences = [_outcome(comparison)]
    if comparison and not math.isnan(comparison.predicted_speedup):
        sentences.append(f"The simulation expected {units.ratio(comparison.predicted_speedup)}.")
    if num_cores is not None and num_cores < num_processes:
        sentences.append(
            f"Note: {num_processes} processes share {num_cores} core{'s' if num_cores > 1 else ''}, so idle processes "
            "give their core to busy ones: balance gains less here than with a device each."
        )
    return " ".join(sentences)


def _outcome(found: Comparison | None) -> str:
    if found is None:
        return "Not compared: no global batch was trained in data-blind (arrival) order, so no gain is claimed."
    if not found.pairs:
        return "Not compared: no global batch has measured steps under both policies, so no gain is claimed."
    batches = f"{len(found.pairs)} global batch{'es' if len(found.pairs) > 1 else ''}"
    if math.isnan(found.speedup_low):
        return (
            f"Undecided: only {batches} ran under both policies (measured speedup {units.ratio(found.speedup)}), too "
            f"few to tell a gain from noise; {MIN_BATCHES} are needed."
        )
    measured = (
        f"measured speedup {found.speedup:.3f}x, 95 % interval {found.speedup_low:.3f}x to {found.speedup_high:.3f}x"
    )
    if not found.is_conclusive:
        return f"No difference beyond noise between balanced and data-blind steps on the same {batches} ({measured})."
    if found.speedup > 1:
        saved = units.percent(1 - 1 / found.speedup)
        return (
            f"Balanced won: its steps took {saved} less time than data-blind ones on the same {batches} ({measured})."
        )
    lost = units.percent(1 / found.speedup - 1)
    return f"Data-blind won: balanced steps took {lost} more time on the same {batches} ({measured})."


def _stats(policy: str, steps: Sequence[MeasuredStep]) -> PolicyStats:
    if not steps:
        return PolicyStats(policy, 0, *[math.nan] * 6)
    q1, median, q3 = np.quantile([s.step_s for s in steps], [0.25, 0.5, 0.75]).tolist()
    return PolicyStats(
        policy=policy,
        num_steps=len(steps),
        step_s=median,
        step_q1_s=q1,
        step_q3_s=q3,
        pipeline_s=statistics.median(s.pipeline_s for s in steps),
        predicted_step_s=statistics.median(s.predicted_step_s for s in steps),
        idle_frac=statistics.fmean(s.idle_frac for s in steps),
    )


def _pair(steps: Sequence[MeasuredStep], plans: Sequence[StepPlan]) -> tuple[BatchPair, ...]:
    batch_of = {plan.step: plan.sample_index for plan in plans}
    sides: dict[tuple[int, ...], dict[str, list[MeasuredStep]]] = {}
    for s in steps:
        if s.policy in (ARRIVAL, BALANCED) and s.step in batch_of and s.step_s > 0:
            sides.setdefault(batch_of[s.step], {ARRIVAL: [], BALANCED: []})[s.policy].append(s)
    return tuple(
        BatchPair(batch, tuple(found[ARRIVAL]), tuple(found[BALANCED]))
        for batch, found in sides.items()
        if found[ARRIVAL] and found[BALANCED]
    )


def _geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(r) for r in ratios)) if ratios else math.nan


def _interval(pairs: Sequence[BatchPair]) -> tuple[float, float]:
    num_pairs = len(pairs)
    if num_pairs < MIN_BATCHES:
        return math.nan, math.nan
    rng = np.random.default_rng(0)

    def medians(side: Sequence[MeasuredStep]) -> NDArray[np.float64]:
        seconds = np.array([s.step_s for s in side])
        medians_s: NDArray[np.float64] = np.median(
            seconds[rng.integers(len(side), size=(NUM_RESAMPLES, len(side)))], axis=1
        )
        return medians_s

    # Inner level: logs[b] are log ratios of batch b under resampled repeats. Outer level: batches, one of these each.
    logs = np.stack([np.log(medians(p.arrival) / medians(p.balanced)) for p in pairs])
    shape = (NUM_RESAMPLES, num_pairs)
    means = logs[rng.integers(num_pairs, size=shape), rng.integers(NUM_RESAMPLES, size=shape)].mean(axis=1)
    low, high = np.exp(np.quantile(means, [0.025, 0.975])).tolist()
    return low, high


def _nearest_median(side: Sequence[MeasuredStep]) -> MeasuredStep:
    median_s = statistics.median(s.step_s for s in side)
    return min(side, key=lambda s: (abs(s.step_s - median_s), s.step))
