"""Small pictures of how parts grow, all of the same scale, the one that exceeds its bound most first."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from tests.bench.growth.part import LEAST_PEAK, Growth

TIME, MEMORY = "#0072B2", "#E69F00"
"""Okabe-Ito; marks and dashes tell them apart without colours, too."""
INK = "#777777"
"""Readable on white and on black."""
COLUMNS, WIDTH, HEIGHT = 6, 2.1, 1.6
"""Pictures side by side, and the size of each in inches, its title included."""
TOP, TITLE, BOTTOM = 0.35, 0.4, 0.45
"""Inches for the key, the titles of the first row, and what stands below the last one."""
STYLE = {
    "axes.edgecolor": INK, "axes.labelcolor": INK, "axes.spines.right": False, "axes.spines.top": False,
    "font.size": 7, "grid.alpha": 0.3, "grid.color": INK, "legend.frameon": False, "svg.fonttype": "none",
    "svg.hashsalt": "growth", "text.color": INK, "xtick.color": INK, "ytick.color": INK,
}  # fmt: skip


def save(found: Sequence[Growth], path: Path) -> None:
    """Draws every part that was measured at two sizes at least: times as much work against times as much of either.

    Args:
        found: In the order to draw them in.
        path: .svg, .png or .pdf.
    """
    drawn = [growth for growth in found if growth.exponent is not None]
    if not drawn:
        return
    rows = math.ceil(len(drawn) / COLUMNS)
    with matplotlib.rc_context(STYLE):
        height = rows * HEIGHT + TOP + BOTTOM
        figure = Figure(figsize=(COLUMNS * WIDTH, height))
        # Placed by hand: matplotlib's own layouts take a minute over dozens of pictures.
        figure.subplots_adjust(
            left=0.07, right=0.99, top=1 - (TOP + TITLE) / height, bottom=BOTTOM / height, wspace=0.12, hspace=0.62
        )
        grid = figure.subplots(rows, COLUMNS, squeeze=False, sharex=True, sharey=True)
        for axes, growth in zip(grid.flat, drawn, strict=False):
            _draw(axes, growth)
        for axes in grid.flat[len(drawn) :]:
            axes.set_visible(False)
        grid[0, 0].set_ylim(0.5, 2 * max(value for growth in drawn for line in _lines(growth) for value in line))
        figure.supxlabel("times as much work", fontsize=8, y=0.05 / height)
        figure.supylabel("times as much time or memory", fontsize=8, x=0.005)
        figure.legend(handles=_key(), loc="upper center", ncols=3, fontsize=8)
        is_picture = path.suffix == ".png"
        figure.savefig(
            path, transparent=not is_picture, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110
        )


def _draw(axes: Axes, growth: Growth) -> None:
    times = [p.size / growth.points[0].size for p in growth.points]
    axes.plot([1, times[-1]], [1, times[-1] ** growth.bound], color=INK, linestyle=":", linewidth=1)
    styles = ((TIME, "o", "-"), (MEMORY, "s", "--"))
    for values, (colour, mark, dashes) in zip(_lines(growth), styles, strict=False):
        axes.plot(times, values, color=colour, marker=mark, markersize=3, linewidth=1.2, linestyle=dashes)
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
        axis.set_minor_locator(NullLocator())
    axes.grid(linewidth=0.4)
    name = textwrap.fill(growth.name, 30)
    found = f"{growth.exponent:.2f} of {growth.bound:g}"
    axes.set_title(f"{name}\n{found}", fontsize=6.5, loc="left", fontweight="bold" if growth.is_above else "normal")


def _lines(growth: Growth) -> list[list[float]]:
    """Seconds, and memory where there is enough to tell, in those of the smallest size."""
    first = growth.points[0]
    found = [[p.cpu_s / first.cpu_s for p in growth.points]]
    if growth.memory_exponent is not None:
        least = max(first.peak_bytes, LEAST_PEAK)
        found.append([max(p.peak_bytes, LEAST_PEAK) / least for p in growth.points])
    return found


def _key() -> list[Line2D]:
    return [
        Line2D([], [], color=TIME, marker="o", markersize=3, label="processor seconds"),
        Line2D(
            [],
            [],
            color=MEMORY,
            marker="s",
            markersize=3,
            linestyle="--",
            label="peak memory, where it is 16 MiB or more",
        ),
        Line2D([], [], color=INK, linestyle=":", label="bound of the exponent of seconds"),
    ]
