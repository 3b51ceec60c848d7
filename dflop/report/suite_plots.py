"""Pictures of simulated comparisons: bars per case with the bound above, lines over a swept quantity."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from dflop import units
from dflop.report.plots import Picture, legend, tell_ticks

# Okabe-Ito and two of Tol's, and a mark for every colour: distinct without colours, too. A competitor looks the same
# everywhere.
STYLES = {
    "uniform tuned": ("#D55E00", "X"),
    "uniform default": ("#999999", "v"),
    "length-grouped": ("#56B4E9", "s"),
    "reference": ("#E69F00", "^"),
    "token LPT": ("#CC79A7", "D"),
    "Megatron expert": ("#009E73", "P"),
    "FSDP2": ("#000000", "p"),
    "FSDP2 + SP": ("#882255", "h"),
    "Megatron + CP": ("#661100", "<"),
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
    x_is_frac: bool = False
    """Else its axis is logarithmic."""
    y_from_zero: bool = False


def bars(name: str, label: str, groups: Sequence[str], series: Sequence[Series], bound: Sequence[float]) -> Picture:
    """Speedups over the baseline: a group of bars per case and a line for the bound of each.

    Args:
        name: As `label`, see `Picture`.
        label: What it shows.
        groups: Names of the cases.
        series: Competitors, as many values each as there are groups.
        bound: Speed-up that no plan can exceed, per group.
    """

    def draw(figure: Figure) -> None:
        axes, ink, width = figure.subplots(), rcParams["text.color"], 0.8 / len(series)
        for k, one in enumerate(series):
            at = np.arange(len(groups)) + (k - (len(series) - 1) / 2) * width
            colour, _ = STYLES.get(one.label, OTHER_STYLE)
            errors = _errors(one.values, one.low, one.high) if one.low else None
            axes.bar(at, one.values, width * 0.92, color=colour, label=one.label, yerr=errors, ecolor=ink)
        for group, most in enumerate(bound):
            label = BOUND if group == 0 else None
            axes.plot([group - 0.44, group + 0.44], [most, most], color=ink, linewidth=1.4, label=label)
        axes.axhline(1, color=ink, linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(groups)), groups, fontsize=8)
        axes.set(ylabel="times as fast as the baseline", ylim=(0, None))
        axes.grid(axis="y", linewidth=0.3)
        axes.set_axisbelow(True)
        legend(figure, fontsize=8)

    return Picture(name, label, (max(6.0, 2.0 + 1.3 * len(groups)), 4.8), draw)


def lines(name: str, label: str, panels: Sequence[Panel]) -> Picture:
    """Diagrams, two in a row, with bands for intervals."""
    num_columns = min(MAX_COLUMNS, len(panels))
    num_rows, is_alone = -(-len(panels) // num_columns), len(panels) == 1

    def draw(figure: Figure) -> None:
        for axes, panel in zip_longest(figure.subplots(num_rows, num_columns, squeeze=False).flat, panels):
            if panel is None:
                axes.set_axis_off()
                continue
            _lines(axes, panel)
            axes.set_title(panel.title, fontsize=9)
        legend(figure, fontsize=8, ncols=2 if is_alone else 4)

    return Picture(name, label, (4.8, 4.0) if is_alone else (5.2 * num_columns, 0.8 + 3.6 * num_rows), draw)


def competitors(
    name: str, label: str, rows: Sequence[tuple[str, float, float, float]], bound: float, x_label: str
) -> Picture:
    """Bars of one setting, one below the other, with their intervals and the bound.

    Args:
        name: As `label`, see `Picture`.
        label: What it shows.
        rows: (competitor, speed-up, ends of its 95 % interval or NaN).
        bound: Speed-up that no plan can exceed.
        x_label: What speed-ups are over.
    """

    def draw(figure: Figure) -> None:
        axes, ink = figure.subplots(), rcParams["text.color"]
        beside = axes.get_yaxis_transform()  # where no line is
        for y, (competitor, speedup, low, high) in enumerate(rows):
            colour, _ = STYLES["dflop" if competitor.startswith("dflop") else "uniform default"]
            axes.barh(y, speedup, color=colour, height=0.7)
            if low <= speedup <= high:
                axes.errorbar(speedup, y, xerr=_errors([speedup], [low], [high]), color=ink, capsize=3, linewidth=1)
            axes.text(1.01, y, f"{speedup:.3f}x", transform=beside, va="center", fontsize=9)
        axes.axvline(1, color=ink, linewidth=0.8, linestyle=":")
        axes.axvline(bound, color=ink, linewidth=1.4, linestyle="--", label=f"{BOUND} {units.ratio(bound)}")
        axes.set_yticks(range(len(rows)), ["\n".join(textwrap.wrap(row[0], 26)) for row in rows], fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        most = max(high if high == high else speedup for _, speedup, _, high in rows)
        axes.set(
            xlabel=x_label, xlim=(0, 1.03 * max(most, min(bound, 3 * most)))
        )  # a bound far off would hide the bars
        legend(figure)

    return Picture(name, label, (5.6, 1.2 + 0.42 * len(rows)), draw)


def _lines(axes: Axes, panel: Panel) -> None:
    for one in panel.series:
        if one.label == BOUND:
            axes.plot(panel.x, one.values, color=rcParams["text.color"], linestyle="--", linewidth=1, label=one.label)
            continue
        colour, mark = STYLES.get(one.label, OTHER_STYLE)
        axes.plot(panel.x, one.values, color=colour, marker=mark, markersize=4, linewidth=1.2, label=one.label)
        if one.low:
            axes.fill_between(panel.x, one.low, one.high, color=colour, alpha=0.18, linewidth=0)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    if not panel.x_is_frac:
        axes.set_xscale("log", base=2)
    axes.set_xticks(panel.x)
    axes.xaxis.set_minor_locator(NullLocator())
    tell_ticks(axes.xaxis, (lambda x: f"{x * 100:.0f} %") if panel.x_is_frac else _short)
    if panel.y_from_zero:
        axes.set_ylim(bottom=0)
    axes.grid(linewidth=0.3)


def _errors(values: Sequence[float], low: Sequence[float], high: Sequence[float]) -> list[list[float]]:
    """Whiskers as matplotlib takes them: lengths below and above."""
    ends = [(max(0.0, v - a), max(0.0, b - v)) for v, a, b in zip(values, low, high, strict=True)]
    return [[below for below, _ in ends], [above for _, above in ends]]


def _short(x: float) -> str:
    """`0.125 -> '1/8'`, others without needless digits."""
    return f"1/{round(1 / x)}" if 0 < x < 1 and abs(1 / x - round(1 / x)) < 1e-9 else f"{x:g}"
