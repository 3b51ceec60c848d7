"""The picture of the paper's models: a group of bars per case, and a line for the bound of each."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import rcParams
from matplotlib.figure import Figure

from dflop.compare.contest import OURS
from dflop.records.speedup import speedup
from dflop.report.plots import Picture, legend
from tests.bench.suite_tables import Case

COLOURS = {
    "uniform tuned": "#D55E00",
    "uniform default": "#999999",
    "length-grouped": "#56B4E9",
    "reference": "#E69F00",
    "token LPT": "#CC79A7",
    "Megatron expert": "#009E73",
    "FSDP2": "#000000",
    "FSDP2 + SP": "#882255",
    "Megatron + CP": "#661100",
    OURS: "#0072B2",
}  # Okabe-Ito, and two of Tol's


def save_picture(cases: Sequence[Case], path: Path) -> None:
    """Draws speedups over each case's baseline; cases without one are left out."""
    cases = [case for case in cases if case["baseline"]]

    def draw(figure: Figure) -> None:
        axes, ink, width = figure.subplots(), rcParams["text.color"], 0.8 / len(COLOURS)
        for k, (name, colour) in enumerate(COLOURS.items()):
            at = np.arange(len(cases)) + (k - (len(COLOURS) - 1) / 2) * width
            found = [
                speedup(_baseline(case), case["step_s"][name]) if name in case["step_s"] else None for case in cases
            ]
            means = [of.mean if of else math.nan for of in found]
            ends = None
            if name == OURS:
                ends = [[of.mean - of.low for of in found if of], [of.high - of.mean for of in found if of]]
            axes.bar(at, means, width * 0.92, color=colour, label=name, yerr=ends, ecolor=ink)
        for group, case in enumerate(cases):
            most, label = speedup(_baseline(case), case["bound_s"]).mean, "bound" if group == 0 else None
            axes.plot([group - 0.44, group + 0.44], [most, most], color=ink, linewidth=1.4, label=label)
        axes.axhline(1, color=ink, linewidth=0.8, linestyle=":")
        groups = ["\n".join((*case["model"].split(" + "), case["data"])) for case in cases]
        axes.set_xticks(range(len(groups)), groups, fontsize=8)
        axes.set(ylabel="times as fast as the baseline", ylim=(0, None))
        axes.grid(axis="y", linewidth=0.3)
        axes.set_axisbelow(True)
        legend(figure, fontsize=8)

    title = f"Simulated, paper's models; costs {cases[0]['costs']}"
    Picture("bars", title, (max(6.0, 2.0 + 1.3 * len(cases)), 4.8), draw).save(path, title)


def _baseline(case: Case) -> Sequence[float]:
    found: Sequence[float] = case["step_s"][case["baseline"]]
    return found
