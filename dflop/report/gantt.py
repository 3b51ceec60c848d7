"""Steps as pictures: a lane per process, bars where it worked, steps of one batch below one another on one axis.

`dflop/report/timeline.py` makes them of what a run measured, `dflop/views/explain_plan.py` of what a plan simulates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dflop import units
from dflop.report.plots import BLUE, GREY, INK, ORANGE, Picture, legend

FORWARD, BACKWARD, UPDATE = "forward", "backward", "gradient reduction + optimizer"
COLOURS = {FORWARD: BLUE, BACKWARD: ORANGE, UPDATE: GREY}
WIDTH_IN = 9.6
MAX_LANES = 24
"""Most lanes of a step; more would not be readable."""
MIN_EDGE_FRAC = 0.004
"""Bars narrower than this share of the axis have no edge: they would be all edge."""
DIGIT_FRAC, PADDING_FRAC = 0.009, 0.003
"""Share of the axis a microbatch's number takes: bars too short for the longest one have none."""
IDLE_ALPHA, THIN_ALPHA = 0.12, 0.55
ROOM_FRAC = 0.09
"""Share of the axis right of the longest step, for its time."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Something a process did. Times count from the start of the step."""

    kind: str
    """A key of `COLOURS`."""
    start_s: float
    duration_s: float
    microbatch: int = -1
    """Counted from 0; -1: none."""
    hint: str = ""
    """What a page tells of it when it is pointed at."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One process, or one of several that do the same."""

    name: str
    bars: tuple[Bar, ...]
    thin: tuple[Bar, ...] = ()
    """Drawn below the others: what was predicted."""


@dataclass(frozen=True, slots=True)
class StepPicture:
    """A step under one policy."""

    title: str
    lanes: tuple[Lane, ...]
    busy_until_s: float
    """Lanes are shaded up to here: what is not a bar there is waiting."""
    end_s: float
    left_out: str = ""
    """Says which lanes are not shown."""

    @property
    def last_s(self) -> float:
        """When the last of its bars ends."""
        return max([self.end_s, *(bar.start_s + bar.duration_s for lane in self.lanes for bar in lane.thin)])


def gantt(name: str, label: str, steps: Sequence[StepPicture]) -> Picture:
    """One or more steps below one another, the data-blind one first; a page tells the hints of their bars."""

    def draw(figure: Figure) -> dict[str, list[str]]:
        ratios, hints = [len(step.lanes) + 0.5 for step in steps], dict[str, list[str]]()
        panels = figure.subplots(len(steps), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": ratios})[:, 0]
        end_s = max(step.last_s for step in steps)
        unit_s, unit = (1.0, "s") if end_s >= 2 else (1e-3, "ms")
        for number, (axes, step) in enumerate(zip(panels, steps, strict=True)):
            _panel(axes, step, end_s, unit_s)
            for y, lane in enumerate(step.lanes):
                hints |= _lane(axes, f"bars{number}-{y}", y, lane, end_s, unit_s)
        panels[-1].set_xlabel(f"time since the start of the step ({unit})")
        found = {kind: Patch(facecolor=COLOURS[kind]) for kind in (FORWARD, BACKWARD)}
        found |= {"idle": Patch(facecolor=INK, alpha=IDLE_ALPHA), UPDATE: Patch(facecolor=GREY)}
        if any(lane.thin for step in steps for lane in step.lanes):
            found["thin: predicted, simulated"] = Patch(facecolor=BLUE, alpha=THIN_ALPHA)
        legend(figure, found)
        return hints

    height_in = 1.5 + 0.45 * len(steps) + 0.3 * sum(len(step.lanes) for step in steps)
    return Picture(name, label, (WIDTH_IN, height_in), draw)


def _panel(axes: Axes, step: StepPicture, end_s: float, unit_s: float) -> None:
    for y in range(len(step.lanes)):
        axes.broken_barh(
            [(0, step.busy_until_s / unit_s)], (y - 0.4, 0.8), facecolors=INK, alpha=IDLE_ALPHA, linewidth=0
        )
    axes.axvline(step.end_s / unit_s, color=INK, linewidth=1.2, linestyle="--")
    at = (step.end_s / unit_s, len(step.lanes) / 2 - 0.5)
    axes.annotate(units.seconds(step.end_s), at, (4, 0), textcoords="offset points", va="center")
    axes.set_title(step.title)
    axes.set_ylabel(step.left_out)
    axes.set_yticks(range(len(step.lanes)), [lane.name for lane in step.lanes])
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, (1 + ROOM_FRAC) * end_s / unit_s), ylim=(len(step.lanes) - 0.5, -0.5))
    axes.grid(axis="x")
    axes.set_axisbelow(True)


def _lane(axes: Axes, name: str, y: int, lane: Lane, end_s: float, unit_s: float) -> dict[str, list[str]]:
    """Draws a lane and returns its hints by `gid`."""
    height, hints = 0.55 if lane.thin else 0.8, dict[str, list[str]]()
    num_digits = len(str(max((bar.microbatch for bar in lane.bars), default=0)))
    for kind, colour in COLOURS.items():
        for wide in (False, True):
            own = [bar for bar in lane.bars if bar.kind == kind and (bar.duration_s >= MIN_EDGE_FRAC * end_s) == wide]
            drawn = axes.broken_barh(
                [(bar.start_s / unit_s, bar.duration_s / unit_s) for bar in own], (y - 0.4, height),
                facecolors=colour, edgecolor="white" if wide else "none", linewidth=0.4 * wide,
            )  # fmt: skip
            if any(bar.hint for bar in own):
                drawn.set_gid(gid := f"{name}-{'fbu'[list(COLOURS).index(kind)]}{wide:d}")
                hints[gid] = [bar.hint for bar in own]
        thin = [(bar.start_s / unit_s, bar.duration_s / unit_s) for bar in lane.thin if bar.kind == kind]
        axes.broken_barh(thin, (y + 0.18, 0.22), facecolors=colour, alpha=THIN_ALPHA, edgecolor="white", linewidth=0.4)
    for bar in lane.bars:
        if bar.microbatch >= 0 and bar.duration_s >= (PADDING_FRAC + DIGIT_FRAC * num_digits) * end_s:
            x, ink = (bar.start_s + bar.duration_s / 2) / unit_s, "white" if bar.kind == FORWARD else "black"
            middle = y - 0.4 + height / 2
            axes.text(x, middle, str(bar.microbatch), color=ink, ha="center", va="center_baseline", fontsize=8)
    return hints
