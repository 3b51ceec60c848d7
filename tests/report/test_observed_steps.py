import pytest

from dflop.report.observed_steps import measured_steps
from tests.report.runs import make_span, observe


def test_a_step_is_as_long_as_its_slowest_rank() -> None:
    (step,) = measured_steps(
        [observe(0, 1, step_s=2.0, busy_s=1.0, update_s=0.5), observe(0, 0, step_s=1.6, busy_s=1.5)]
    )
    assert [r.rank for r in step.ranks] == [0, 1]
    assert step.step_s == 2.0
    assert step.pipeline_s == 1.6  # rank 1 finished its backward after 1.5 s
    assert step.idle_frac == pytest.approx(1 - 2.5 / 4.0)


def test_a_repeated_step_counts_once_as_its_last_attempt() -> None:
    seen = [observe(1, 0, attempt=0, step_s=9.0), observe(1, 1, attempt=0, step_s=9.0), observe(0)]
    seen += [observe(1, 0, attempt=1, step_s=1.0)]
    steps = measured_steps(seen)
    assert [(s.step, len(s.ranks), s.step_s) for s in steps] == [(0, 1, 1.0), (1, 1, 1.0)]


def test_throughput_counts_the_tokens_of_every_data_parallel_rank_once() -> None:
    spans = [make_span(k, 0.1, 0.2, num_tokens=50) for k in range(2)]
    seen = [
        observe(0, 0, module="vision", spans=[make_span(0, 0.1, 0.2, num_tokens=7000)]),
        observe(0, 1, spans=spans, step_s=2.0),
        observe(0, 2, spans=spans),  # the same tokens on the other half of a tensor-parallel group
        observe(0, 3, spans=spans, dp_rank=1),
        observe(0, 4, spans=spans, stage=1),
    ]
    assert measured_steps(seen)[0].llm_tokens_per_s == pytest.approx(2 * 100 / 2.0)
