"""Plots of how a run went: what they are given is in them, and they are there only where there is something to show."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dflop.report import plots, run_plots
from dflop.report.accuracy import TimedSpan, timed_spans
from dflop.report.balance import evenness, stage_shares
from dflop.report.details import RunDetails
from dflop.report.steps import MeasuredStep
from dflop.report.summary import RunSummary
from tests.report.runs import observe

MEMORY = (("vision pp0", 2**29, 2**30), ("llm pp0", 2**28, None))
DRAWN: dict[str, Callable[[RunSummary, RunDetails], str | None]] = {
    "throughput": lambda s, d: run_plots.throughput_curve(s.steps, d.plan_steps),
    "scatter": lambda s, d: run_plots.prediction_scatter(timed_spans(s.steps)),
    "corrections": lambda s, d: run_plots.correction_curves(d.corrections, d.plan_steps),
    "idle": lambda s, d: run_plots.idle_bars(stage_shares(s.comparison.pairs, s.plan) if s.comparison else ()),
    "balance": lambda s, d: run_plots.balance_bars(_evenness(s)),
    "memory": lambda s, d: run_plots.memory_bars(MEMORY, 2**31),
}


def _evenness(summary: RunSummary):
    pair = summary.comparison.typical_pair() if summary.comparison else None
    return evenness(pair, summary.plan) if pair else ()


@dataclass(frozen=True)
class Drawing:
    """A plot of the run, with the figure that it was written from."""

    svg: str
    figure: Figure

    @property
    def axes(self) -> Axes:
        (axes,) = self.figure.axes
        return axes


@pytest.fixture(scope="module")
def drawings(run: tuple[RunSummary, RunDetails], saved: list[Figure]) -> dict[str, Drawing]:
    """Every plot of the run, drawn once."""
    found = {}
    for name, draw in DRAWN.items():
        svg = draw(*run)
        assert svg is not None
        found[name] = Drawing(svg, saved[-1])
    return found


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


LABELS = {
    "throughput": "LLM tokens per second",
    "scatter": "measured compute of a microbatch",
    "corrections": "measured over predicted",
    "idle": "share of the step (%); right of the bars: idle",
    "balance": "microbatch",
    "memory": "peak memory of a process (GiB)",
}


@pytest.mark.parametrize("name", DRAWN)
def test_plots_are_valid_labelled_and_whole(name: str, drawings: dict[str, Drawing]) -> None:
    svg, figure = drawings[name].svg, drawings[name].figure
    root = ET.fromstring(svg)
    assert root.get("aria-label")
    assert root.get("class") == "plot"
    assert not re.search(r"\sstyle=|<style", svg)
    ids = [node.get("id") for node in root.iter() if node.get("id")]
    assert all(i.startswith(f"{name}-") for i in ids)
    assert LABELS[name] in texts(svg)

    figure.draw_without_rendering()
    whole = figure.bbox
    for axes in figure.axes:
        for text in (axes.xaxis.label, axes.yaxis.label, axes.title, *axes.get_yticklabels(), *axes.texts):
            box = text.get_window_extent()
            if text.get_text() and text.get_visible():
                assert whole.x0 - 1 <= box.x0 < box.x1 <= whole.x1 + 1, text.get_text()


def test_nothing_to_show_is_no_plot() -> None:
    assert run_plots.throughput_curve([MeasuredStep(0, "balanced", (observe(0),))]) is None
    assert run_plots.prediction_scatter(()) is None
    assert run_plots.correction_curves(()) is None
    assert run_plots.idle_bars(()) is None
    assert run_plots.balance_bars(()) is None
    assert run_plots.memory_bars((), 2**30) is None


def test_throughput_is_tokens_over_seconds_smoothed_as_the_view_does(drawings, run) -> None:
    summary, _ = run
    each, recent, another = drawings["throughput"].axes.lines
    assert list(each.get_ydata()) == pytest.approx([s.llm_tokens_per_s for s in summary.steps])
    last = summary.steps[-10:]
    tokens = sum(s.llm_tokens_per_s * s.step_s for s in last)
    assert recent.get_ydata()[-1] == pytest.approx(tokens / sum(s.step_s for s in last))
    assert another.get_xdata()[0] == 13, "steps count from 1 for people"


def test_a_scatter_has_a_diagonal_and_every_module(drawings, run) -> None:
    spans = timed_spans(run[0].steps)
    equal, *modules = drawings["scatter"].axes.lines
    assert list(equal.get_xdata()) == list(equal.get_ydata())
    assert [line.get_label() for line in modules] == ["audio", "vision", "llm"]
    assert sum(len(line.get_xdata()) for line in modules) == min(len(spans), run_plots.MAX_POINTS)
    assert len({line.get_marker() for line in modules}) == 3


def test_microseconds_and_minutes_have_ticks_all_the_same(drawn) -> None:
    for scale in (1e-6, 0.03, 100.0):
        run_plots.prediction_scatter([TimedSpan("llm", 1, scale * f, scale) for f in (0.9, 1.1)])
        (axes,) = drawn[-1].axes
        low, high = axes.get_xlim()
        assert [t for t in axes.get_xticks() if low <= t <= high]


def test_corrections_are_steps_of_what_is_applied(drawings) -> None:
    axes = drawings["corrections"].axes
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines["llm, typical mix"].get_xdata()) == [4, 10, 16]
    assert list(lines["llm, typical mix"].get_ydata()) == pytest.approx([1.06, 1.18, 1.3])
    buckets = [line for line in axes.lines if line.get_linewidth() == 0.8 and len(line.get_xdata()) == 3]
    assert len(buckets) == 3, "of the LLM; one bucket is no size"
    assert sorted(line.get_ydata()[0] for line in buckets) == [1.06] * 3, "not in force: the level"
    assert sorted(line.get_ydata()[-1] for line in buckets) == pytest.approx([1.3, 1.55, 1.8])


def test_long_runs_have_small_plots(run) -> None:
    summary, details = run
    many = [replace(summary.steps[i % 24], step=i) for i in range(6000)]
    told = [replace(c, effective_step=i, observed_at_s=float(i)) for i in range(1000) for c in details.corrections[:4]]
    spans = [TimedSpan("llm", 1, 1.0 + i / 1e5, 1.0) for i in range(20_000)]
    scatter = run_plots.prediction_scatter(spans)
    assert scatter.count("<use") <= run_plots.MAX_POINTS + 100
    for svg in (scatter, run_plots.throughput_curve(many), plots.loss_curve(many), run_plots.correction_curves(told)):
        assert svg is not None
        assert len(svg) < 400_000


def test_memory_that_nobody_measured_has_no_bar(drawings, drawn) -> None:
    axes = drawings["memory"].axes
    assert sorted(bar.get_width() for bar in axes.patches) == [0.25, 0.5, 1.0]
    assert axes.lines[0].get_xdata()[0] == 2.0
    run_plots.memory_bars([(stage, predicted, None) for stage, predicted, _ in MEMORY], 2**31)
    legend = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert legend == ["predicted", "limit"]


def test_steps_that_know_no_tokens_are_left_out(run) -> None:
    summary, _ = run
    blank = replace(summary.steps[0], ranks=tuple(replace(r, spans=()) for r in summary.steps[0].ranks))
    assert math.isnan(blank.llm_tokens_per_s)
    assert run_plots.throughput_curve([blank, *summary.steps[1:]]) is not None
