"""How right the cost model was while a run trained: predicted beside measured seconds of every microbatch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dflop import units
from dflop.report.observed_steps import MeasuredStep
from dflop.report.tables import Table


@dataclass(frozen=True, slots=True)
class TimedSpan:
    """One microbatch on one stage, forward and backward together; seconds of compute, corrections included."""

    module: str
    num_tokens: int
    predicted_s: float
    measured_s: float

    @property
    def error_frac(self) -> float:
        """|predicted - measured| / measured."""
        return abs(self.predicted_s - self.measured_s) / self.measured_s


@dataclass(frozen=True, slots=True)
class SizeError:
    """Spans of one module whose microbatches have `min_tokens` to `2 * min_tokens - 1` tokens."""

    module: str
    min_tokens: int
    num_spans: int
    median_error_frac: float
    p95_error_frac: float
    predicted_to_measured: float
    """Of all their seconds together: the bias, where the median error is the scatter."""


def timed_spans(steps: Iterable[MeasuredStep]) -> tuple[TimedSpan, ...]:
    """Spans with a prediction; steps that ran without the scheduler have none."""
    found = []
    for step in steps:
        for rank in step.ranks:
            for span in rank.spans:
                predicted_s = span.predicted_forward_s + span.predicted_backward_s
                measured_s = span.forward_compute_s + span.backward_compute_s
                if predicted_s > 0 and measured_s > 0:
                    found.append(TimedSpan(rank.module, span.num_tokens, predicted_s, measured_s))
    return tuple(found)


def errors_by_size(spans: Iterable[TimedSpan]) -> tuple[SizeError, ...]:
    """Errors per module and octave of tokens, as the view `v_prediction_error_by_size` has them, by both."""
    groups: dict[tuple[str, int], list[TimedSpan]] = {}
    for span in spans:
        octave = 1 << (max(1, span.num_tokens).bit_length() - 1)
        groups.setdefault((span.module, octave), []).append(span)
    return tuple(_error(module, octave, of) for (module, octave), of in sorted(groups.items()))


def error_table(found: Sequence[SizeError]) -> Table:
    """One row per module and size."""
    return Table(
        "Error by size of the microbatch",
        ("module", "tokens", "microbatches", "median error", "95 % are below", "predicted / measured"),
        tuple(
            (
                e.module,
                f"{units.count(e.min_tokens)} to {units.count(2 * e.min_tokens - 1)}",
                str(e.num_spans),
                units.percent(e.median_error_frac),
                units.percent(e.p95_error_frac),
                units.ratio(e.predicted_to_measured),
            )
            for e in found
        ),
        frozenset({"module", "tokens"}),
        "Seconds of compute per microbatch and stage, forward and backward together. Predicted by the cost model, with "
        "the corrections that were in force when the step was planned.",
    )


def _error(module: str, octave: int, spans: Sequence[TimedSpan]) -> SizeError:
    errors = [span.error_frac for span in spans]
    return SizeError(
        module=module,
        min_tokens=octave,
        num_spans=len(spans),
        median_error_frac=statistics.median(errors),
        p95_error_frac=float(np.quantile(errors, 0.95)),
        predicted_to_measured=sum(s.predicted_s for s in spans) / sum(s.measured_s for s in spans),
    )
