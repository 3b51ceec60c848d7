from __future__ import annotations

from dataclasses import replace

import pytest

from dflop.report.accuracy import TimedSpan, error_table, errors_by_size, timed_spans
from dflop.report.observed_steps import measured_steps
from tests.report.runs import make_span, observe


def test_spans_without_prediction_or_measurement_are_left_out() -> None:
    spans = [
        make_span(0, 0.1, 0.2, num_tokens=100, predicted=1.5),
        make_span(1, 0.1, 0.2, predicted=0.0),
        replace(make_span(2, 0.1, 0.2), forward_compute_s=0.0, backward_compute_s=0.0),
    ]
    (found,) = timed_spans(measured_steps([observe(0, spans=spans)]))
    assert (found.module, found.num_tokens) == ("llm", 100)
    assert (found.predicted_s, found.measured_s) == pytest.approx((0.45, 0.3))
    assert found.error_frac == pytest.approx(0.5)


def test_errors_are_grouped_by_octaves_of_tokens() -> None:
    spans = [
        TimedSpan("llm", 64, 1.1, 1.0), TimedSpan("llm", 127, 0.7, 1.0), TimedSpan("llm", 100, 1.2, 1.0),
        TimedSpan("llm", 128, 2.0, 1.0), TimedSpan("audio", 0, 1.0, 1.0),
    ]  # fmt: skip
    audio, small, large = errors_by_size(spans)
    assert (audio.module, audio.min_tokens, audio.num_spans) == ("audio", 1, 1)
    assert (small.min_tokens, small.num_spans) == (64, 3)
    assert small.median_error_frac == pytest.approx(0.2)
    assert small.p95_error_frac == pytest.approx(0.29)
    assert small.predicted_to_measured == pytest.approx(1.0)
    assert (large.min_tokens, large.median_error_frac) == (128, 1.0)
    rows = error_table([audio, small, large]).rows
    assert rows[1] == ("llm", "64 to 127", "3", "20.0 %", "29.0 %", "1.00x")
