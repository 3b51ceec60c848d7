"""Plots of a run as inline SVG: no files, no scripts, no network, the same bytes for the same values.

Text stays text (selectable, small) and ink becomes `currentColor`, so that one SVG serves light and dark pages. Ids
are prefixed with the plot's name because several plots share one HTML document. Colours are from the Okabe-Ito set,
which all common kinds of colour blindness tell apart; hatching and labels repeat what colour says.
"""

from __future__ import annotations

import html
import io
import re
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from dflop import units
from dflop.records import Plan, StepObservation
from dflop.report.compare import BatchPair, Comparison, PolicyStats
from dflop.report.steps import MeasuredStep
from dflop.report.tables import POLICY_NAMES, stage_name

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

BLUE, ORANGE, SKY, GREY = "#0072B2", "#E69F00", "#56B4E9", "#999999"
FORWARD, BACKWARD, UPDATE = BLUE, ORANGE, GREY
SMOOTHED_STEPS = 5
MAX_LANES = 24
"""Ranks a timeline shows; more would not be readable."""
MIN_LABEL_FRAC = 0.025
"""A bar narrower than this share of the axis carries no number: it would not fit."""

INK = "#010203"
"""Stands for the page's text colour until the SVG is written."""
STYLE: dict[RcKeyType, Any] = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "font.family": "sans-serif",
    "font.size": 10,
    "grid.alpha": 0.2,
    "grid.color": INK,
    "hatch.color": BLUE,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
}


def loss_curve(steps: Sequence[MeasuredStep]) -> str:
    """SVG of the measured loss per training step."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        x, y = [s.step + 1 for s in steps], [s.loss for s in steps]
        axes.plot(x, y, color=SKY, linewidth=1, marker=".", markersize=4, label="step")
        if len(y) >= 4 * SMOOTHED_STEPS:
            axes.plot(
                x, _rolling_mean(y, SMOOTHED_STEPS), color=BLUE, linewidth=2, label=f"mean of last {SMOOTHED_STEPS}"
            )
            figure.legend(loc="outside lower center", ncols=2, fontsize=9)
        axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y")

    return svg_text("loss", "Loss per optimizer step, measured", (5.2, 3.0), draw)


def step_time_bars(comparison: Comparison) -> str:
    """SVG of the median step time of both policies, measured beside simulated, in ms."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        ends = [end for i, p in enumerate(comparison.policies) for end in _policy_bars(axes, 3 * i, p)]
        positions = [3 * i + bar for i in range(len(comparison.policies)) for bar in (0, 1)]
        labels = [f"{POLICY_NAMES[p.policy]}\n{how}" for p in comparison.policies for how in ("measured", "simulated")]
        axes.set_yticks(positions, labels)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set(xlabel="time per step (ms), median", xlim=(0, 1.22 * max(ends)))
        axes.grid(axis="x")
        axes.set_axisbelow(True)
        handles = [
            Patch(facecolor=BLUE, label="forward + backward"),
            Patch(facecolor=UPDATE, label="reduction + optimizer (not simulated)"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9)

    return svg_text("bars", "Step time by policy, measured and simulated", (5.2, 3.0), draw)


def timeline(pair: BatchPair, plan: Plan) -> str:
    """SVG of one global batch under both policies: a lane per rank, measured spans, the same axis in ms."""
    arrival, balanced = pair.typical()

    def draw(figure: Figure) -> None:
        above, below = figure.subplots(2, 1, sharex=True)
        end_ms = 1e3 * max(arrival.step_s, balanced.step_s)
        for axes, step in ((above, arrival), (below, balanced)):
            _lanes(axes, plan, step, end_ms)
            idle = units.percent(step.idle_frac)
            axes.set_title(f"{POLICY_NAMES[step.policy]}: {units.seconds(step.step_s)}, {idle} idle, measured")
        below.set_xlabel("time since the start of the step (ms)")
        handles = [
            Patch(facecolor=FORWARD, label="forward"),
            Patch(facecolor=BACKWARD, label="backward"),
            Patch(facecolor=UPDATE, label="gradient reduction (with waiting) + optimizer"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)

    lanes = min(MAX_LANES, len(arrival.ranks)) + min(MAX_LANES, len(balanced.ranks))
    name = "Measured timeline of one global batch, data-blind above balanced"
    return svg_text("timeline", name, (9.6, 1.9 + 0.3 * lanes), draw)


def _policy_bars(axes: Axes, y: int, policy: PolicyStats) -> tuple[float, float]:
    """Draws the measured and the simulated bar; returns where they end, error bar included."""
    pipeline_ms, step_ms, predicted_ms = 1e3 * policy.pipeline_s, 1e3 * policy.step_s, 1e3 * policy.predicted_step_s
    q1_ms, q3_ms = 1e3 * policy.step_q1_s, 1e3 * policy.step_q3_s
    axes.barh(y, pipeline_ms, color=BLUE)
    axes.barh(y, max(0.0, step_ms - pipeline_ms), left=pipeline_ms, color=UPDATE)
    axes.errorbar(step_ms, y, xerr=[[step_ms - q1_ms], [q3_ms - step_ms]], color=INK, capsize=3, linewidth=1)
    axes.barh(y + 1, predicted_ms, facecolor="none", edgecolor=BLUE, hatch="///", linewidth=1.5)
    for bar, end_ms, value_ms in ((y, max(step_ms, q3_ms), step_ms), (y + 1, predicted_ms, predicted_ms)):
        axes.annotate(units.seconds(value_ms / 1e3), (end_ms, bar), (5, 0), textcoords="offset points", va="center")
    return max(step_ms, q3_ms), predicted_ms


def _lanes(axes: Axes, plan: Plan, step: MeasuredStep, end_ms: float) -> None:
    shown = step.ranks[:MAX_LANES]
    for lane, rank in enumerate(shown):
        for span in rank.spans:
            for start_s, length_s, colour, ink in (
                (span.forward_start_s, span.forward_s, FORWARD, "white"),
                (span.backward_start_s, span.backward_s, BACKWARD, "black"),
            ):
                _block(axes, lane, 1e3 * start_s, 1e3 * length_s, colour)
                if 1e3 * length_s >= MIN_LABEL_FRAC * end_ms:
                    x_ms = 1e3 * (start_s + length_s / 2)
                    axes.text(
                        x_ms, lane, str(span.microbatch + 1), color=ink, ha="center", va="center_baseline", fontsize=8
                    )
        update_s = rank.reduce_s + rank.optimizer_s
        _block(axes, lane, 1e3 * (rank.step_s - update_s), 1e3 * update_s, UPDATE)
    axes.set_yticks(range(len(shown)), [_lane_name(plan, rank) for rank in shown])
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, end_ms), ylim=(len(shown) - 0.5, -0.5))
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    if len(shown) < len(step.ranks):
        axes.set_ylabel(f"first {len(shown)} of {len(step.ranks)} ranks")


def _block(axes: Axes, lane: int, start_ms: float, length_ms: float, colour: str) -> None:
    if length_ms > 0:
        axes.barh(lane, length_ms, left=start_ms, height=0.8, color=colour, edgecolor="white", linewidth=0.4)


def _lane_name(plan: Plan, rank: StepObservation) -> str:
    return f"{rank.rank}: {stage_name(plan, rank.module, rank.stage)} dp{rank.dp_rank}"


def _rolling_mean(values: Sequence[float], window: int) -> list[float]:
    return [statistics.fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def svg_text(name: str, label: str, size: tuple[float, float], draw: Callable[[Figure], None]) -> str:
    """Runs `draw` on a figure of `size` inches and returns one `<svg>` element."""
    out = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=no_metadata)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :].strip().replace(INK, "currentColor")
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    # Size comes from the page; a plot is not blown up beyond 96 px per inch.
    opening, rest = svg.split(">", 1)
    opening = re.sub(r' (width|height)="[^"]*"', "", opening)
    return f'{opening} role="img" aria-label="{html.escape(label)}" style="max-width: {96 * size[0]:.0f}px">{rest}'
