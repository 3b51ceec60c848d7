"""Did balancing help? The same global batches, trained in arrival order, under other baselines and balanced.

Batches differ far more from one another than the policies do, so steps are paired by global batch before anything is
averaged. The speedup is not computed here: it is that of the store's view `v_speedup`, so that everybody who asks gets
the same figure with the same interval. With fewer than 3 batches there is no interval, and no winner is named.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop import units
from dflop.records import StepPlan
from dflop.records.speedup import MIN_BATCHES, NOT_COMPARED, Speedup
from dflop.report.observed_steps import MeasuredStep
from dflop.report.tables import POLICY_NAMES

ARRIVAL, BALANCED = "arrival", "balanced"
Speedups = Mapping[str, tuple[Speedup, Speedup]]
"""Measured and simulated, by baseline."""


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
        arrival_s, balanced_s = (statistics.median(s.step_s for s in side) for side in (self.arrival, self.balanced))
        return arrival_s / balanced_s

    def typical(self) -> list[MeasuredStep]:
        """The arrival and the balanced step nearest to their medians."""
        found = []
        for side in (self.arrival, self.balanced):
            median_s = statistics.median(s.step_s for s in side)
            found.append(min(side, key=lambda s: (abs(s.step_s - median_s), s.step)))
        return found


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the comparison job measured, warm-up left out."""

    policies: tuple[PolicyStats, ...]
    """`arrival`, other baselines, `balanced`; a policy without steps is absent."""
    pairs: tuple[BatchPair, ...]
    speedups: Speedups

    @property
    def measured(self) -> Speedup:
        """Arrival / balanced step time, above 1 when balancing helped."""
        return self.speedups[ARRIVAL][0] if ARRIVAL in self.speedups else NOT_COMPARED

    @property
    def predicted(self) -> Speedup:
        """Of the simulated steps of the same batches."""
        return self.speedups[ARRIVAL][1] if ARRIVAL in self.speedups else NOT_COMPARED

    def typical_pair(self) -> BatchPair | None:
        """The batch of median speedup (not the best one), to show as an example."""
        ranked = sorted(self.pairs, key=lambda p: (p.speedup, p.sample_index))
        return ranked[(len(ranked) - 1) // 2] if ranked else None


def compare_policies(steps: Sequence[MeasuredStep], plans: Sequence[StepPlan], speedups: Speedups) -> Comparison | None:
    """Comparison of policies; None when none has a step.

    Args:
        steps: Of the comparison job, warm-up included (it is left out here).
        plans: Step plans of the same job; a step without one cannot be paired.
        speedups: Rows of `v_speedup`.
    """
    # A comparison that was started again counts with its last attempt, in the store as here.
    steps = [s for s in steps if s.policy in POLICY_NAMES]
    last = max((s.ranks[0].attempt for s in steps), default=0)
    steps = [s for s in steps if s.ranks[0].attempt == last]
    sides = ([s for s in steps if s.policy == policy] for policy in POLICY_NAMES)
    policies = tuple(_stats(side) for side in sides if side)
    return Comparison(policies, _pair(steps, plans), speedups) if policies else None


def verdict(comparison: Comparison | None, *, num_processes: int, num_cores: int | None) -> str:
    """Plain sentences: who won, by how much, whether that is more than noise, and what sharing cores hides of it."""
    sentences = [_outcome(comparison)]
    if comparison and comparison.predicted.num_batches:
        sentences.append(f"The simulation expected {_text(comparison.predicted)}.")
    for baseline, (measured, _) in (comparison.speedups if comparison else {}).items():
        if baseline != ARRIVAL:
            sentences.append(f"Over {POLICY_NAMES[baseline]} steps it was {_text(measured)}.")
    if num_cores is not None and num_cores < num_processes:
        sentences.append(
            f"Note: {num_processes} processes share {num_cores} core{'s' if num_cores > 1 else ''}, so a waiting "
            "process frees its core for others: balancing gains less here than with one device per process."
        )
    return " ".join(sentences)


def _outcome(found: Comparison | None) -> str:
    if found is None or not (speedup := found.measured).num_batches:
        missing = "was trained in arrival order" if found is None else "has measured steps under both policies"
        return f"Not compared: no global batch {missing}, so no gain is claimed."
    batches = f"{speedup.num_batches} global batch{'es' if speedup.num_batches > 1 else ''}"
    measured = f"measured speedup {_text(speedup)}"
    if not speedup.has_interval:
        return (
            f"Undecided: only {batches} ran under both policies ({measured}), too few to separate a gain from noise; "
            f"{MIN_BATCHES} are needed."
        )
    if not speedup.is_conclusive:
        return f"No difference beyond noise between balanced steps and arrival order on the same {batches}: {measured}."
    if speedup.mean > 1:
        saved = units.percent(1 - 1 / speedup.mean)
        return (
            f"Balanced was faster: its steps took {saved} less time than in arrival order on the same {batches}: "
            f"{measured}."
        )
    lost = units.percent(1 / speedup.mean - 1)
    return f"Arrival order was faster: balanced steps took {lost} more time on the same {batches}: {measured}."


def _text(found: Speedup) -> str:
    return units.speedup(found.mean, found.low, found.high)


def _stats(steps: Sequence[MeasuredStep]) -> PolicyStats:
    q1, median, q3 = np.quantile([s.step_s for s in steps], [0.25, 0.5, 0.75]).tolist()
    return PolicyStats(
        policy=steps[0].policy,
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
    pairs = (BatchPair(batch, tuple(found[ARRIVAL]), tuple(found[BALANCED])) for batch, found in sides.items())
    return tuple(pair for pair in pairs if pair.arrival and pair.balanced)
