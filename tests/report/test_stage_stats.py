import math
from dataclasses import replace

import pytest

from dflop.report.observed_steps import MeasuredStep, measured_steps
from dflop.report.stage_stats import TimedSpan, error_table, errors_of, stage_stats, timed_spans
from tests.builders import make_plan
from tests.report.runs import make_span, observe

PLAN = make_plan({"vision": 1, "llm": 1}, num_microbatches=2)


def step(number: int, seconds: tuple[float, float]) -> MeasuredStep:
    """The LLM's two microbatches take the given seconds, vision's are alike."""
    spans = [make_span(k, s / 3, 2 * s / 3) for k, s in enumerate(seconds)]
    vision = [make_span(k, 0.01, 0.02) for k in range(2)]
    ranks = (
        observe(number, 1, step_s=2.0, busy_s=sum(seconds), update_s=0.4, spans=spans),
        observe(number, 0, module="vision", step_s=2.0, busy_s=0.5, update_s=0.2, spans=vision),
    )
    return MeasuredStep(number, "balanced", ranks)


def test_shares_of_every_stage_come_in_the_plans_order_and_add_up() -> None:
    vision, llm = stage_stats([step(0, (0.3, 0.9)), step(1, (0.6, 0.6))], PLAN)
    assert (vision.stage, llm.stage, vision.layers, llm.num_ranks) == ("vision pp0", "llm pp0", "vision 4", 1)
    assert (vision.busy_frac, llm.busy_frac) == pytest.approx((0.25, 0.6))
    assert (vision.update_frac, llm.update_frac) == pytest.approx((0.1, 0.2))
    assert (llm.wait_frac, llm.idle_frac) == pytest.approx((0.2, 0.4))


def test_evenness_is_the_largest_microbatch_of_a_step_over_its_mean_one() -> None:
    vision, llm = stage_stats([step(0, (0.3, 0.9)), step(1, (0.6, 0.6))], PLAN)
    assert (vision.max_over_mean, llm.max_over_mean) == pytest.approx((1.0, 1.25))
    idle = replace(step(0, (0.3, 0.9)), ranks=tuple(replace(r, spans=()) for r in step(0, (0.3, 0.9)).ranks))
    assert math.isnan(stage_stats([idle], PLAN)[1].max_over_mean)


def test_of_a_tensor_parallel_group_the_slowest_rank_speaks() -> None:
    one = step(0, (0.3, 0.9))
    slower = replace(one.ranks[0], rank=2, spans=(make_span(0, 0.3, 0.6), *one.ranks[0].spans[1:]))
    assert stage_stats([replace(one, ranks=(*one.ranks, slower))], PLAN)[1].max_over_mean == pytest.approx(1.0)


def test_a_stage_of_an_earlier_plan_has_no_layers_now() -> None:
    (llm,) = stage_stats([MeasuredStep(0, "balanced", (observe(0, stage=1),))], PLAN)
    assert (llm.stage, llm.layers) == ("llm pp1", "")


def test_errors_are_about_compute_seconds_of_spans_that_were_predicted_and_measured() -> None:
    # The process waited for a core half of the time: the wall clock is twice the prediction, the cost model is right.
    waited = replace(make_span(0, 0.2, 0.4, predicted=0.5), forward_compute_s=0.1, backward_compute_s=0.2)
    spans = [
        make_span(0, 0.1, 0.2, num_tokens=100, predicted=1.5),
        waited,
        make_span(1, 0.1, 0.2, predicted=0.0),
        replace(make_span(2, 0.1, 0.2), forward_compute_s=0.0, backward_compute_s=0.0),
    ]
    found = timed_spans(measured_steps([observe(0, spans=spans)]))
    assert [(s.module, s.num_tokens) for s in found] == [("llm", 100), ("llm", 0)]
    assert (found[0].predicted_s, found[0].measured_s) == pytest.approx((0.45, 0.3))
    assert errors_of(found).median_frac == pytest.approx(0.25)
    assert errors_of(found).predicted_to_measured == pytest.approx(0.75 / 0.6)
    assert math.isnan(errors_of([]).median_frac)


def test_errors_are_grouped_by_octaves_of_tokens() -> None:
    spans = [
        TimedSpan("llm", 64, 1.1, 1.0), TimedSpan("llm", 127, 0.7, 1.0), TimedSpan("llm", 100, 1.2, 1.0),
        TimedSpan("llm", 128, 2.0, 1.0), TimedSpan("audio", 0, 1.0, 1.0),
    ]  # fmt: skip
    assert error_table(spans).rows == (
        ("audio", "1 to 1", "1", "0.0 %", "0.0 %", "1.00x"),
        ("llm", "64 to 127", "3", "20.0 %", "29.0 %", "1.00x"),
        ("llm", "128 to 255", "1", "100.0 %", "100.0 %", "2.00x"),
    )
