"""Pictures of simulated comparisons: bars per case with the bound above, lines over a swept quantity.

As files (PNG, SVG, PDF), and as SVG for a page.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
from matplotlib import rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from dflop import units
from dflop.report.plots import save_drawing, svg_text

# Okabe-Ito, and a mark beside every colour: told apart without colours, too. A competitor looks the same everywhere.
STYLES = {
    "uniform tuned": ("#D55E00", "X"),
    "uniform default": ("#999999", "v"),
    "length-grouped": ("#56B4E9", "s"),
    "reference": ("#E69F00", "^"),
    "token LPT": ("#CC79A7", "D"),
    "tuned + our batches": ("#009E73", "P"),
    "dflop": ("#0072B2", "o"),
}
OTHER_STYLE = ("#F0E442", "*")
BOUND = "bound"
MAX_COLUMNS = 2


@dataclass(frozen=True, slots=True)
class Series:
    """One competitor over all cases or over the swept quantity; NaN where it has nothing."""

    label: str
    values: tuple[float, ...]
    low: tuple[float, ...] = ()
    """Ends of 95 % intervals; empty: none."""
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram of several competitors."""

    title: str
    x_label: str
    x: tuple[float, ...]
    y_label: str
    series: tuple[Series, ...]
    x_is_log2: bool = True
    x_is_frac: bool = False
    y_from_zero: bool = False


def save_bars(groups: Sequence[str], series: Sequence[Series], bound: Sequence[float], path: Path, title: str) -> None:
    """Draws speed-ups over the tuned uniform plan: a group of bars per case and a line for the bound of each.

    Args:
        groups: Names of the cases.
        series: Competitors, as many values each as there are groups.
        bound: Speed-up that no plan can exceed, per group.
        path: .png, .svg or .pdf.
        title: Says that it is simulated, and with which costs.

    Raises:
        ConfigError: the suffix of the path is none that can be drawn.
        OSError: the file cannot be written.
    """

    def draw(figure: Figure) -> None:
        figure.suptitle(title, fontsize=10)
        _draw_bars(figure, groups, series, bound)

    save_drawing(path, "bars", title, _bars_size(groups), draw)


def bars_svg(name: str, label: str, groups: Sequence[str], series: Sequence[Series], bound: Sequence[float]) -> str:
    """The same for a page; see `svg_text` for the first two."""
    return svg_text(name, label, _bars_size(groups), lambda figure: _draw_bars(figure, groups, series, bound))


def save_lines(panels: Sequence[Panel], path: Path, title: str) -> None:
    """Draws diagrams, two in a row, with bands for intervals.

    Raises:
        ConfigError: the suffix of the path is none that can be drawn.
        OSError: the file cannot be written.
    """
    num_columns = min(MAX_COLUMNS, len(panels))
    num_rows = -(-len(panels) // num_columns)

    def draw(figure: Figure) -> None:
        figure.suptitle(title, fontsize=10)
        found: dict[str, Artist] = {}
        for axes, panel in zip_longest(figure.subplots(num_rows, num_columns, squeeze=False).flat, panels):
            if panel is None:
                axes.set_axis_off()
                continue
            _lines(axes, panel)
            handles, labels = axes.get_legend_handles_labels()
            found.update(zip(labels, handles, strict=True))
        figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=4, fontsize=8)

    save_drawing(path, "lines", title, (5.2 * num_columns, 0.8 + 3.6 * num_rows), draw)


def line_svg(name: str, panel: Panel) -> str:
    """One diagram for a page, its title left to the page."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _lines(axes, panel)
        axes.set_title("")
        figure.legend(loc="outside lower center", ncols=2, fontsize=8)

    return svg_text(name, panel.title, (4.8, 4.0), draw)


def competitors_svg(name: str, label: str, rows: Sequence[tuple[str, float, float, float]], bound: float) -> str:
    """Bars of one setting, one below the other, with their intervals and the bound.

    Args:
        name: As `svg_text`.
        label: As `svg_text`.
        rows: (competitor, speed-up, ends of its 95 % interval or NaN).
        bound: Speed-up that no plan can exceed.
    """

    def draw(figure: Figure) -> None:
        axes, ink = figure.subplots(), rcParams["text.color"]
        for y, (competitor, speedup, low, high) in enumerate(rows):
            colour = STYLES["dflop"][0] if competitor.startswith("dflop") else STYLES["uniform default"][0]
            axes.barh(y, speedup, color=colour, height=0.7)
            if low <= speedup <= high:
                axes.errorbar(speedup, y, xerr=[[speedup - low], [high - speedup]], color=ink, capsize=3, linewidth=1)
            end = high if low <= speedup <= high else speedup
            axes.annotate(units.ratio(speedup), (end, y), (5, 0), textcoords="offset points", va="center", fontsize=9)
        axes.axvline(1, color=ink, linewidth=0.8, linestyle=":")
        axes.axvline(bound, color=ink, linewidth=1.4, linestyle="--", label=f"{BOUND} {units.ratio(bound)}")
        axes.set_yticks(range(len(rows)), ["\n".join(textwrap.wrap(row[0], 26)) for row in rows], fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        most = max([bound, *(high if high == high else speedup for _, speedup, _, high in rows)])
        axes.set(xlabel="times as fast as uniform, tuned", xlim=(0, 1.18 * most))
        figure.legend(loc="outside lower center", fontsize=9)

    return svg_text(name, label, (5.6, 1.2 + 0.42 * len(rows)), draw)


def _bars_size(groups: Sequence[str]) -> tuple[float, float]:
    return max(6.0, 2.0 + 1.3 * len(groups)), 4.8


def _draw_bars(figure: Figure, groups: Sequence[str], series: Sequence[Series], bound: Sequence[float]) -> None:
    axes, ink = figure.subplots(), rcParams["text.color"]
    width = 0.8 / len(series)
    for k, one in enumerate(series):
        at = np.arange(len(groups)) + (k - (len(series) - 1) / 2) * width
        axes.bar(
            at,
            one.values,
            width * 0.92,
            color=STYLES.get(one.label, OTHER_STYLE)[0],
            label=one.label,
            yerr=_errors(one),
            ecolor=ink,
        )
    for group, most in enumerate(bound):
        label = BOUND if group == 0 else None
        axes.plot([group - 0.44, group + 0.44], [most, most], color=ink, linewidth=1.4, label=label)
    axes.axhline(1, color=ink, linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.set(ylabel="times as fast as uniform tuned", ylim=(0, None))
    axes.grid(axis="y", linewidth=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=len(series) + 1, fontsize=8)


def _lines(axes: Axes, panel: Panel) -> None:
    for one in panel.series:
        colour, mark = STYLES.get(one.label, OTHER_STYLE)
        if one.label == BOUND:
            ink = rcParams["text.color"]
            axes.plot(panel.x, one.values, color=ink, linestyle="--", linewidth=1, label=one.label)
            continue
        axes.plot(panel.x, one.values, color=colour, marker=mark, markersize=4, linewidth=1.2, label=one.label)
        if one.low:
            axes.fill_between(panel.x, one.low, one.high, color=colour, alpha=0.18, linewidth=0)
    axes.set_title(panel.title, fontsize=9)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.x_is_log2:
        axes.set_xscale("log", base=2)
    axes.set_xticks(panel.x)
    axes.xaxis.set_minor_locator(NullLocator())
    text = (lambda x: f"{x * 100:.0f} %") if panel.x_is_frac else _short
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: text(x)))
    if panel.y_from_zero:
        axes.set_ylim(bottom=0)
    axes.grid(linewidth=0.3)


def _errors(one: Series) -> list[list[float]] | None:
    if not one.low:
        return None
    below = [max(0.0, value - low) for value, low in zip(one.values, one.low, strict=True)]
    above = [max(0.0, high - value) for value, high in zip(one.values, one.high, strict=True)]
    return [below, above]


def _short(x: float) -> str:
    """`0.125 -> '1/8'`, others without needless digits."""
    return f"1/{round(1 / x)}" if 0 < x < 1 and abs(1 / x - round(1 / x)) < 1e-9 else f"{x:g}"
