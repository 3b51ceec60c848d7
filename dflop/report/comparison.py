"""Did balancing help? The same global batches, trained in arrival order, under other baselines and balanced.

Batches differ far more from one another than the policies do, so steps are paired by global batch before anything is
averaged. The speedup is not computed here: it is that of the store's view `v_speedup`, so that everybody who asks gets
the same figure with the same interval. A policy's step time is the geometric mean over the global batches that all
policies ran, medians over repeats: the ratio of two policies is their speedup. With fewer than 3 batches there is no
interval, and no winner is named.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
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
    """Geometric mean over global batches, measured."""
    step_q1_s: float
    """Quartiles of single steps."""
    step_q3_s: float
    pipeline_s: float
    """As `step_s`, forward and backward only: the counterpart of `predicted_step_s`."""
    predicted_step_s: float
    """As `step_s`, simulated; 0 where a batch was not."""
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
        """Speed-up of the simulated steps of the same batches."""
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
    batch_of = {plan.step: plan.sample_index for plan in plans}
    sides: dict[str, dict[tuple[int, ...], list[MeasuredStep]]] = {}
    for s in steps:
        if s.step_s > 0:
            # A step without a plan is a batch of its own.
            sides.setdefault(s.policy, {}).setdefault(batch_of.get(s.step, (-1, s.step)), []).append(s)
    shared = set.intersection(*map(set, sides.values())) if sides else set()
    policies = tuple(_stats(sides[policy], shared) for policy in POLICY_NAMES if policy in sides)
    arrival, balanced = (sides.get(policy, {}) for policy in (ARRIVAL, BALANCED))
    both = [batch for batch in arrival if batch in balanced]
    pairs = tuple(BatchPair(batch, tuple(arrival[batch]), tuple(balanced[batch])) for batch in both)
    return Comparison(policies, pairs, speedups) if policies else None


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


def _stats(
    batches: Mapping[tuple[int, ...], Sequence[MeasuredStep]], shared: Collection[tuple[int, ...]]
) -> PolicyStats:
    """Statistics over the global batches that all policies ran; over all, where they share none."""
    steps = [step for of_batch in batches.values() for step in of_batch]
    wanted = [batches[batch] for batch in batches if not shared or batch in shared]

    def mean(of: Callable[[MeasuredStep], float]) -> float:
        medians = [statistics.median(map(of, repeats)) for repeats in wanted]
        return statistics.geometric_mean(medians) if min(medians) > 0 else 0.0

    q1, q3 = np.quantile([s.step_s for s in steps], [0.25, 0.75]).tolist()
    return PolicyStats(
        policy=steps[0].policy,
        num_steps=len(steps),
        step_s=mean(lambda s: s.step_s),
        step_q1_s=q1,
        step_q3_s=q3,
        pipeline_s=mean(lambda s: s.pipeline_s),
        predicted_step_s=mean(lambda s: s.predicted_step_s),
        idle_frac=statistics.fmean(s.idle_frac for s in steps),
    )
