"""A simulated step as a picture: one lane per stage, data-blind above balanced, on one axis. PNG, SVG, PDF."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dflop import units
from dflop.records import Plan
from dflop.report.data_plots import check_suffix
from dflop.report.plots import BACKWARD, FORWARD, INK, MAX_LANES, STYLE, UPDATE, svg_text
from dflop.report.tables import POLICY_NAMES, layout_text, stage_name
from dflop.simulate.step import step_nodes

WIDTH_IN, DPI = 9.6, 125
"""1200 pixels across."""
MIN_EDGE_FRAC = 0.004
"""Bars narrower than this share of the axis have no edge: they would be all edge."""
DIGIT_FRAC, PADDING_FRAC = 0.009, 0.003
"""Of the axis, for a microbatch's number: bars that the longest one does not fit into have none."""
MAX_TITLE_CHARS = 105
IDLE_ALPHA = 0.12
ROOM_FRAC = 0.09
"""Of the axis, right of the longest step: for the time it takes."""
# On a page of its own a picture brings its page's colours along.
PAGE_STYLE = (
    "<style>svg { color: #1b1f24; background: #ffffff; font-family: sans-serif } "
    "@media (prefers-color-scheme: dark) { svg { color: #e6e8ea; background: #14171a } }</style>"
)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepPicture:
    """When everything of one simulated step runs."""

    policy: str
    start_s: Floats
    """`[nodes, microbatches, 2]`, nodes as by `step_nodes`: forward, backward."""
    end_s: Floats

    @property
    def pipeline_s(self) -> float:
        """When the last operation ends."""
        return float(self.end_s.max(initial=0.0))

    @property
    def busy_s(self) -> Floats:
        """`[nodes]`."""
        busy: Floats = (self.end_s - self.start_s).sum(axis=(1, 2))
        return busy


@dataclass(frozen=True, slots=True)
class Lane:
    """One process of a stage (of several tensor-parallel ones, each)."""

    label: str
    node: int


def lanes(plan: Plan, step: StepPicture, most: int = MAX_LANES) -> list[Lane]:
    """Per stage the data-parallel rank 0, and the rank of its module whose work ends last if it is another.

    The latter are left out where all of them are more than `most`; then stages beyond that number, too.
    """
    nodes, end_s = step_nodes(plan), step.end_s.max(axis=(1, 2), initial=0.0)
    first: list[Lane] = []
    both: list[Lane] = []
    for pipe in plan.pipes:
        own = [i for i, (module, _, _) in enumerate(nodes) if module == pipe.module]
        last = int(np.argmax([max(end_s[i] for i in own if nodes[i][2] == r) for r in range(pipe.parallel.dp)]))
        for i in own:
            _, stage, rank = nodes[i]
            name = stage_name(plan, pipe.module, stage)
            if rank == 0:
                first.append(Lane(f"{name} dp0", i))
            if rank in (0, last):
                both.append(Lane(f"{name} dp{rank}" + " (ends last)" * (rank == last and pipe.parallel.dp > 1), i))
    return both if len(both) <= most else first[:most]


def save_step_pictures(plan: Plan, steps: Sequence[StepPicture], source: str, path: Path) -> None:
    """Draws simulated steps of the same global batch below one another.

    Args:
        plan: Whose steps they are; its `sync_s` ends each of them.
        steps: One or more, the data-blind one first.
        source: Of the costs.
        path: .png, .svg or .pdf.

    Raises:
        ConfigError: the suffix of the path is none that can be drawn.
        OSError: the file cannot be written.
    """
    check_suffix(path)
    shown = [lanes(plan, step) for step in steps]
    size = (WIDTH_IN, 1.7 + 0.45 * len(steps) + 0.3 * sum(map(len, shown)))
    title = f"{layout_text(plan)}, {plan.num_microbatches} microbatches: one global batch, simulated"

    def draw(figure: Figure) -> None:
        lines = [*textwrap.wrap(title, MAX_TITLE_CHARS), *textwrap.wrap(f"costs {source}", MAX_TITLE_CHARS)]
        figure.suptitle("\n".join(lines), fontsize=10)
        panels = figure.subplots(
            len(steps), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": [len(of) + 0.5 for of in shown]}
        )[:, 0]
        end_s = max(step.pipeline_s for step in steps) + plan.sync_s
        unit_s, unit = (1.0, "s") if end_s >= 2 else (1e-3, "ms")
        for axes, step, of in zip(panels, steps, shown, strict=True):
            _panel(axes, plan, step, of, end_s, unit_s)
        panels[-1].set_xlabel(f"time since the start of the step ({unit})")
        figure.legend(handles=_legend(), loc="outside lower center", ncols=4, fontsize=9)

    if path.suffix.lower() == ".svg":
        opening, rest = svg_text("plan", title, size, draw).split(">", 1)
        path.write_text(f"{opening}>{PAGE_STYLE}{rest}\n", encoding="utf-8")
        return
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "plan"}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        figure.savefig(path, dpi=DPI)


def _panel(axes: Axes, plan: Plan, step: StepPicture, shown: Sequence[Lane], end_s: float, unit_s: float) -> None:
    pipeline_s, step_s = step.pipeline_s, step.pipeline_s + plan.sync_s
    for y, lane in enumerate(shown):
        axes.broken_barh([(0, pipeline_s / unit_s)], (y - 0.4, 0.8), facecolors=INK, alpha=IDLE_ALPHA, linewidth=0)
        for phase, colour in enumerate((FORWARD, BACKWARD)):
            _work(axes, y, step, lane.node, phase, colour, end_s, unit_s)
        if plan.sync_s > 0:
            axes.broken_barh([(pipeline_s / unit_s, plan.sync_s / unit_s)], (y - 0.4, 0.8), facecolors=UPDATE)
    axes.axvline(step_s / unit_s, color=INK, linewidth=1.2, linestyle="--")
    axes.annotate(
        units.seconds(step_s), (step_s / unit_s, len(shown) / 2 - 0.5), (4, 0), textcoords="offset points", va="center"
    )
    gpus = np.array([plan.module(module).parallel.tp for module, _, _ in step_nodes(plan)])
    idle = 1.0 - float(step.busy_s @ gpus + plan.sync_s * gpus.sum()) / (step_s * float(gpus.sum()))
    name = POLICY_NAMES.get(step.policy, step.policy)
    axes.set_title(f"{name}: {units.seconds(step_s)}, {units.percent(idle)} idle over all ranks, simulated")
    axes.set_yticks(range(len(shown)), [lane.label for lane in shown])
    axes.tick_params(axis="y", length=0)
    num_stages = sum(pipe.parallel.pp for pipe in plan.pipes)
    if len(shown) < num_stages:
        axes.set_ylabel(f"first {len(shown)} of {num_stages} stages")
    axes.set(xlim=(0, (1 + ROOM_FRAC) * end_s / unit_s), ylim=(len(shown) - 0.5, -0.5))
    axes.grid(axis="x")
    axes.set_axisbelow(True)


def _work(
    axes: Axes, y: int, step: StepPicture, node: int, phase: int, colour: str, end_s: float, unit_s: float
) -> None:
    bars = list(_bars(step, node, phase))
    for wide in (False, True):
        drawn = [(a / unit_s, b / unit_s) for _, a, b in bars if (b >= MIN_EDGE_FRAC * end_s) == wide]
        axes.broken_barh(
            drawn, (y - 0.4, 0.8), facecolors=colour, edgecolor="white" if wide else "none", linewidth=0.4 * wide
        )
    num_digits = len(str(step.end_s.shape[1]))
    for k, start_s, length_s in bars:
        if length_s >= (PADDING_FRAC + DIGIT_FRAC * num_digits) * end_s:
            x, ink = (start_s + length_s / 2) / unit_s, "white" if colour == FORWARD else "black"
            axes.text(x, y, str(k + 1), color=ink, ha="center", va="center_baseline", fontsize=8)


def _bars(step: StepPicture, node: int, phase: int) -> Iterator[tuple[int, float, float]]:
    """(microbatch, start, length) of what a node does; what takes no time is nothing."""
    start_s, end_s = step.start_s[node, :, phase], step.end_s[node, :, phase]
    for k in np.flatnonzero(end_s > start_s).tolist():
        yield k, float(start_s[k]), float(end_s[k] - start_s[k])


def _legend() -> list[Patch]:
    return [
        Patch(facecolor=FORWARD, label="forward"),
        Patch(facecolor=BACKWARD, label="backward"),
        Patch(facecolor=INK, alpha=IDLE_ALPHA, label="idle"),
        Patch(facecolor=UPDATE, label="gradient synchronisation + optimizer"),
    ]
