"""Plots of how a run went: what they are given is in them, and they are there only where there is something to show."""

from collections.abc import Callable

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dflop.report import run_plots
from dflop.report.observed_steps import MeasuredStep
from dflop.report.stage_stats import timed_spans
from dflop.report.summary import RunSummary
from tests.report.runs import observe

DRAWN: dict[str, Callable[[RunSummary], str | None]] = {
    "loss": lambda s: run_plots.loss_curve(s.steps),
    "throughput": lambda s: run_plots.throughput_curve(s.steps, s.plan_steps),
    "bars": lambda s: run_plots.step_time_bars(s.comparison) if s.comparison else None,
    "scatter": lambda s: run_plots.prediction_scatter(timed_spans(s.steps)),
}


@pytest.fixture(scope="module")
def drawings(run: RunSummary, saved: list[Figure]) -> dict[str, Axes]:
    """Every plot of the run, drawn once."""
    found = {}
    for name, draw in DRAWN.items():
        assert draw(run) is not None
        found[name] = saved[-1].axes[0]
    return found


def test_nothing_to_show_is_no_plot() -> None:
    assert run_plots.throughput_curve([MeasuredStep(0, "balanced", (observe(0),))]) is None
    assert run_plots.prediction_scatter(()) is None
    assert run_plots.loss_curve(()) is None


def test_bars_of_both_policies_end_where_their_steps_do(drawings, run, saved) -> None:
    ends = [bar.get_x() + bar.get_width() for bar in drawings["bars"].patches]
    for number, policy in enumerate(run.comparison.policies):
        assert ends[3 * number : 3 * number + 3] == pytest.approx(
            [1e3 * s for s in (policy.pipeline_s, policy.step_s, policy.predicted_step_s)]
        )
    assert run_plots.loss_curve(run.steps, {4: 2.5, 9: 2.0}) is not None
    assert list(saved[-1].axes[0].lines[-1].get_ydata()) == [2.5, 2.0]
    assert list(drawings["loss"].lines[0].get_ydata()) == [s.loss for s in run.steps]


def test_throughput_is_tokens_over_seconds_smoothed_as_the_view_does(drawings, run) -> None:
    each, recent, another = drawings["throughput"].lines
    assert list(each.get_ydata()) == pytest.approx([s.llm_tokens_per_s for s in run.steps])
    last = run.steps[-10:]
    tokens = sum(s.llm_tokens_per_s * s.step_s for s in last)
    assert recent.get_ydata()[-1] == pytest.approx(tokens / sum(s.step_s for s in last))
    assert another.get_xdata()[0] == 12, "steps count from 0 everywhere"


def test_a_scatter_has_a_diagonal_and_every_module(drawings, run) -> None:
    spans = timed_spans(run.steps)
    equal, *modules = drawings["scatter"].lines
    assert list(equal.get_xdata()) == list(equal.get_ydata())
    assert [line.get_label() for line in modules] == ["audio", "vision", "llm"]
    assert sum(len(line.get_xdata()) for line in modules) == min(len(spans), run_plots.MAX_MARKERS)
    assert len({line.get_marker() for line in modules}) == 3
