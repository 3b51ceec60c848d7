"""Plots of a run as inline SVG: no files, no scripts, no network, the same bytes for the same values.

Text stays text (selectable, small) and ink becomes `currentColor`, so that one SVG serves light and dark pages. Ids
are prefixed with the plot's name because several plots share one HTML document. Colours are from the Okabe-Ito set,
which all common kinds of colour blindness tell apart; hatching and labels repeat what colour says.
"""

from __future__ import annotations

import html
import io
import math
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
from dflop.report.comparison import Comparison, PolicyStats
from dflop.report.inline_svg import without_styles
from dflop.report.observed_steps import MeasuredStep
from dflop.report.tables import POLICY_NAMES

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

BLUE, ORANGE, SKY, GREY = "#0072B2", "#E69F00", "#56B4E9", "#999999"
FORWARD, BACKWARD, UPDATE = BLUE, ORANGE, GREY
SMOOTHED_STEPS = 5
MAX_MARKERS = 1500
"""Of a line."""
MAX_LANES = 24
"""Ranks a timeline shows; more would not be readable."""

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
    """SVG of the measured loss per training step; there is a gap where a step has none."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        x, y = [s.step + 1 for s in steps], [math.nan if s.loss is None else s.loss for s in steps]
        every = markers_of(len(x))
        axes.plot(x, y, color=SKY, linewidth=1, marker=".", markersize=4, markevery=every, label="step")
        if len(y) >= 4 * SMOOTHED_STEPS:
            known = [(s.step + 1, s.loss) for s in steps if s.loss is not None]
            mean = _rolling_mean([loss for _, loss in known], SMOOTHED_STEPS)
            axes.plot([at for at, _ in known], mean, color=BLUE, linewidth=2, label=f"mean of last {SMOOTHED_STEPS}")
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


def markers_of(num_points: int) -> int:
    """Every which point of a line gets a marker: a marker is a hundred bytes, and thousands hide one another."""
    return max(1, -(-num_points // MAX_MARKERS))


def _rolling_mean(values: Sequence[float], window: int) -> list[float]:
    return [statistics.fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def svg_text(name: str, label: str, size: tuple[float, float], draw: Callable[[Figure], None]) -> str:
    """Runs `draw` on a figure of `size` inches and returns one `<svg class="plot">`, as wide as that at 96 px an inch.

    Args:
        name: Of the drawing, unlike all others of the page.
        label: What it shows, for those who cannot see it.
        size: Width and height.
        draw: Draws.
    """
    out = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=no_metadata)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :].strip().replace(INK, "currentColor")
    svg = without_styles(re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg))
    # Height follows from the width, which the page may make smaller.
    opening, rest = svg.split(">", 1)
    opening = re.sub(r' (width|height)="[^"]*"', "", opening)
    return f'{opening} class="plot" role="img" aria-label="{html.escape(label)}" width="{96 * size[0]:.0f}">{rest}'
