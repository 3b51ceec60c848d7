"""Where the time of every stage went, how even its microbatches were, and how right the predictions of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dflop import units
from dflop.records import Plan, StepObservation
from dflop.report.observed_steps import MeasuredStep
from dflop.report.tables import Table, in_rank_order, make_table, stage_layers, stage_name


@dataclass(frozen=True, slots=True)
class TimedSpan:
    """One microbatch on one stage, forward and backward together; seconds of compute, corrections included."""

    module: str
    num_tokens: int
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True)
class Errors:
    """How right predictions of some spans were; NaN without any."""

    num_spans: int
    median_frac: float
    """Median of |predicted - measured| / measured."""
    p95_frac: float
    predicted_to_measured: float
    """Ratio of all their seconds together: the bias, where the median error is the scatter."""


@dataclass(frozen=True, slots=True)
class StageStats:
    """Some steps of one pipeline stage, its data- and tensor-parallel ranks together; shares are of the step."""

    stage: str
    """`llm pp0`."""
    layers: str
    num_ranks: int
    busy_frac: float
    """Wall time in forward and backward: where processes share cores, waiting for one counts as busy."""
    update_frac: float
    """Gradient reduction, with the wait for slower ranks, and optimizer."""
    max_over_mean: float
    """Compute of the largest microbatch of a step over the mean one, mean over steps; 1 is even, NaN without any."""
    errors: Errors

    @property
    def idle_frac(self) -> float:
        """All but forward and backward, as the view `v_stage_idle` counts it."""
        return 1.0 - self.busy_frac

    @property
    def wait_frac(self) -> float:
        """Waiting for other stages, or for a core."""
        return self.idle_frac - self.update_frac


def stage_stats(steps: Iterable[MeasuredStep], plan: Plan) -> tuple[StageStats, ...]:
    """Every stage that had a rank in these steps, in the plan's order."""
    seen: dict[tuple[str, int], dict[int, list[StepObservation]]] = {}
    for step in steps:
        for rank in step.ranks:
            seen.setdefault((rank.module, rank.stage), {}).setdefault(step.step, []).append(rank)
    place = {pipe.module: i for i, pipe in enumerate(in_rank_order(plan))}
    ordered = sorted(seen, key=lambda key: (place.get(key[0], len(place)), key))
    return tuple(_stats(plan, *key, list(seen[key].values())) for key in ordered)


def timed_spans(steps: Iterable[MeasuredStep]) -> tuple[TimedSpan, ...]:
    """Spans with a prediction; steps that ran without the scheduler have none."""
    return _timed(rank for step in steps for rank in step.ranks)


def errors_of(spans: Sequence[TimedSpan]) -> Errors:
    """Median, 95th percentile and bias of the errors of spans."""
    if not spans:
        return Errors(0, math.nan, math.nan, math.nan)
    predicted = np.array([span.predicted_s for span in spans])
    measured = np.array([span.measured_s for span in spans])
    median, p95 = np.quantile(np.abs(predicted - measured) / measured, [0.5, 0.95]).tolist()
    return Errors(len(spans), median, p95, float(predicted.sum() / measured.sum()))


def error_table(spans: Iterable[TimedSpan]) -> Table:
    """Errors per module and octave of tokens, as the view `v_prediction_error_by_size` has them."""
    groups: dict[tuple[str, int], list[TimedSpan]] = {}
    for span in spans:
        octave = 1 << (max(1, span.num_tokens).bit_length() - 1)
        groups.setdefault((span.module, octave), []).append(span)
    return make_table(
        "Error by size of the microbatch",
        [(module, tokens, errors_of(found)) for (module, tokens), found in sorted(groups.items())],
        {
            "module": lambda row: row[0],
            "tokens": lambda row: f"{units.count(row[1])} to {units.count(2 * row[1] - 1)}",
            "microbatches": lambda row: str(row[2].num_spans),
            "median error": lambda row: units.percent(row[2].median_frac),
            "95th percentile": lambda row: units.percent(row[2].p95_frac),
            "predicted / measured": lambda row: units.ratio(row[2].predicted_to_measured),
        },
        text={"module", "tokens"},
        note="Seconds of compute (on CPUs processor time) per microbatch and stage, forward and backward. Predicted by "
        "the cost model, with the corrections active when the step was planned.",
        empty="No microbatch was both predicted and measured.",
        num_shown=12,
    )


def _stats(plan: Plan, module: str, stage: int, steps: Sequence[Sequence[StepObservation]]) -> StageStats:
    ranks = [rank for of_step in steps for rank in of_step]
    whole_s = sum(rank.step_s for rank in ranks) or math.nan
    uneven = [found for of_step in steps if (found := _max_over_mean(of_step))]
    return StageStats(
        stage=stage_name(plan, module, stage),
        layers=stage_layers(plan, module, stage),
        num_ranks=len({rank.rank for rank in ranks}),
        busy_frac=sum(rank.busy_s for rank in ranks) / whole_s,
        update_frac=sum(rank.reduce_s + rank.optimizer_s for rank in ranks) / whole_s,
        max_over_mean=statistics.fmean(uneven) if uneven else math.nan,
        errors=errors_of(_timed(ranks)),
    )


def _timed(ranks: Iterable[StepObservation]) -> tuple[TimedSpan, ...]:
    found = []
    for module, s in ((rank.module, span) for rank in ranks for span in rank.spans):
        predicted_s = s.predicted_forward_s + s.predicted_backward_s
        measured_s = s.forward_compute_s + s.backward_compute_s
        if predicted_s > 0 and measured_s > 0:
            found.append(TimedSpan(module, s.num_tokens, predicted_s, measured_s))
    return tuple(found)


def _max_over_mean(ranks: Sequence[StepObservation]) -> float:
    """Imbalance of one step; 0 without work. The slowest rank stands for its tensor-parallel group."""
    seconds: dict[tuple[int, int], float] = {}
    for rank in ranks:
        for span in rank.spans:
            place, compute_s = (span.microbatch, rank.dp_rank), span.forward_compute_s + span.backward_compute_s
            seconds[place] = max(compute_s, seconds.get(place, 0.0))
    total_s = sum(seconds.values())
    return max(seconds.values()) * len(seconds) / total_s if total_s > 0 else 0.0
