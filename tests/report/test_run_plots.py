"""Plots of how a run went: what they are given is in them, and they are there only where there is something to show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dflop.report import run_plots
from dflop.report.accuracy import timed_spans
from dflop.report.observed_steps import MeasuredStep
from dflop.report.run_details import RunDetails
from dflop.report.summary import RunSummary
from tests.report.runs import observe

MEMORY = (("vision pp0", 2**29, 2**30), ("llm pp0", 2**28, None))
DRAWN: dict[str, Callable[[RunSummary, RunDetails], str | None]] = {
    "throughput": lambda s, d: run_plots.throughput_curve(s.steps, d.plan_steps),
    "scatter": lambda s, d: run_plots.prediction_scatter(timed_spans(s.steps)),
    "corrections": lambda s, d: run_plots.correction_curves(d.corrections, d.plan_steps),
    "memory": lambda s, d: run_plots.memory_bars(MEMORY, 2**31),
}


@pytest.fixture(scope="module")
def drawings(run: tuple[RunSummary, RunDetails], saved: list[Figure]) -> dict[str, Axes]:
    """Every plot of the run, drawn once."""
    found = {}
    for name, draw in DRAWN.items():
        assert draw(*run) is not None
        found[name] = saved[-1].axes[0]
    return found


def test_nothing_to_show_is_no_plot() -> None:
    assert run_plots.throughput_curve([MeasuredStep(0, "balanced", (observe(0),))]) is None
    assert run_plots.prediction_scatter(()) is None
    assert run_plots.correction_curves(()) is None
    assert run_plots.idle_bars(()) is None
    assert run_plots.balance_bars(()) is None
    assert run_plots.memory_bars((), 2**30) is None


def test_throughput_is_tokens_over_seconds_smoothed_as_the_view_does(drawings, run) -> None:
    summary, _ = run
    each, recent, another = drawings["throughput"].lines
    assert list(each.get_ydata()) == pytest.approx([s.llm_tokens_per_s for s in summary.steps])
    last = summary.steps[-10:]
    tokens = sum(s.llm_tokens_per_s * s.step_s for s in last)
    assert recent.get_ydata()[-1] == pytest.approx(tokens / sum(s.step_s for s in last))
    assert another.get_xdata()[0] == 13, "steps count from 1 for people"


def test_a_scatter_has_a_diagonal_and_every_module(drawings, run) -> None:
    spans = timed_spans(run[0].steps)
    equal, *modules = drawings["scatter"].lines
    assert list(equal.get_xdata()) == list(equal.get_ydata())
    assert [line.get_label() for line in modules] == ["audio", "vision", "llm"]
    assert sum(len(line.get_xdata()) for line in modules) == min(len(spans), run_plots.MAX_POINTS)
    assert len({line.get_marker() for line in modules}) == 3


def test_corrections_are_steps_of_what_is_applied(drawings) -> None:
    axes = drawings["corrections"]
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines["llm, typical mix"].get_xdata()) == [4, 10, 16]
    assert list(lines["llm, typical mix"].get_ydata()) == pytest.approx([1.06, 1.18, 1.3])
    buckets = [line for line in axes.lines if line.get_linewidth() == 0.8 and len(line.get_xdata()) == 3]
    assert len(buckets) == 3, "of the LLM; one bucket is no size"
    assert sorted(line.get_ydata()[0] for line in buckets) == [1.06] * 3, "not in force: the level"
    assert sorted(line.get_ydata()[-1] for line in buckets) == pytest.approx([1.3, 1.55, 1.8])


def test_memory_that_nobody_measured_has_no_bar(drawings, drawn) -> None:
    axes = drawings["memory"]
    assert sorted(bar.get_width() for bar in axes.patches) == [0.25, 0.5, 1.0]
    assert axes.lines[0].get_xdata()[0] == 2.0
    run_plots.memory_bars([(stage, predicted, None) for stage, predicted, _ in MEMORY], 2**31)
    legend = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert legend == ["predicted", "limit"]
