"""Bars of simulated trainers, one below the other, with the bound that none can exceed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib import rcParams
from matplotlib.figure import Figure

from dflop import units
from dflop.report.plots import Picture, legend

OURS, OTHERS = "#0072B2", "#999999"  # Okabe-Ito


def competitor_bars(
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
            axes.barh(y, speedup, color=OURS if competitor.startswith("dflop") else OTHERS, height=0.7)
            if low <= speedup <= high:
                ends = [[speedup - low], [high - speedup]]
                axes.errorbar(speedup, y, xerr=ends, color=ink, capsize=3, linewidth=1)
            axes.text(1.01, y, f"{speedup:.3f}x", transform=beside, va="center", fontsize=9)
        axes.axvline(1, color=ink, linewidth=0.8, linestyle=":")
        axes.axvline(bound, color=ink, linewidth=1.4, linestyle="--", label=f"bound {units.ratio(bound)}")
        axes.set_yticks(range(len(rows)), ["\n".join(textwrap.wrap(row[0], 26)) for row in rows], fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        most = max(high if high == high else speedup for _, speedup, _, high in rows)
        axes.set(
            xlabel=x_label, xlim=(0, 1.03 * max(most, min(bound, 3 * most)))
        )  # a bound far off would hide the bars
        legend(figure)

    return Picture(name, label, (5.6, 1.2 + 0.42 * len(rows)), draw)
