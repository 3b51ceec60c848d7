"""Pictures of the simulated suites: bars per case with the bound above, lines over a swept quantity. PNG, SVG, PDF."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from dflop.report.data_plots import check_suffix

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
    check_suffix(path)
    figure = Figure(figsize=(max(6.0, 2.0 + 1.3 * len(groups)), 4.8), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots()
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
        )
    for group, most in enumerate(bound):
        label = BOUND if group == 0 else None
        axes.plot([group - 0.44, group + 0.44], [most, most], color="black", linewidth=1.4, label=label)
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.set(ylabel="times as fast as uniform tuned", ylim=(0, None))
    axes.grid(axis="y", linewidth=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=len(series) + 1, fontsize=8)
    figure.savefig(path, dpi=110)


def save_lines(panels: Sequence[Panel], path: Path, title: str) -> None:
    """Draws diagrams, two in a row, with bands for intervals.

    Raises:
        ConfigError: the suffix of the path is none that can be drawn.
        OSError: the file cannot be written.
    """
    check_suffix(path)
    num_columns = min(MAX_COLUMNS, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure = Figure(figsize=(5.2 * num_columns, 0.8 + 3.6 * num_rows), layout="constrained")
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
    figure.savefig(path, dpi=110)


def _lines(axes: Axes, panel: Panel) -> None:
    for one in panel.series:
        colour, mark = STYLES.get(one.label, OTHER_STYLE)
        if one.label == BOUND:
            axes.plot(panel.x, one.values, color="black", linestyle="--", linewidth=1, label=one.label)
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
