"""Plots of how a run went: throughput, predictions, corrections, stages, balance. SVG as in `plots.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from dflop import units
from dflop.records import LLM, Correction
from dflop.report.accuracy import TimedSpan
from dflop.report.balance import Evenness, StageShares
from dflop.report.comparison import ARRIVAL
from dflop.report.observed_steps import MeasuredStep
from dflop.report.plots import BLUE, INK, SKY, UPDATE, markers_of, svg_text
from dflop.report.tables import POLICY_NAMES

SIZE = (4.8, 3.0)
RECENT_STEPS = 10
"""As `recent_llm_tokens_per_s` of the view `v_throughput`."""
MAX_POINTS = 1500
"""Of a scatter: more hide one another, and make a large page."""
MAX_LINE_POINTS = 300
"""Of a line of corrections, which a running job writes again and again."""
WAIT_ALPHA = 0.12
MODULE_STYLES = {"llm": ("#0072B2", "o"), "vision": ("#D55E00", "s"), "audio": ("#009E73", "^")}
OTHER_STYLES = (("#CC79A7", "D"), ("#E69F00", "P"), ("#56B4E9", "X"))


def throughput_curve(steps: Sequence[MeasuredStep], plan_steps: Iterable[int] = ()) -> str | None:
    """SVG of LLM tokens per second over training; None where no step knows its tokens.

    Args:
        steps: Of training.
        plan_steps: At which another plan began.
    """
    known = [(s.step + 1, s.llm_tokens_per_s, s.step_s) for s in steps if not math.isnan(s.llm_tokens_per_s)]
    if not known:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        x, speed, step_s = (np.array(column, dtype=float) for column in zip(*known, strict=True))
        every = markers_of(len(x))
        axes.plot(x, speed, color=SKY, linewidth=0, marker=".", markersize=5, markevery=every, label="step")
        if len(x) >= 2 * RECENT_STEPS:
            tokens, at_s = np.cumsum(speed * step_s), np.cumsum(step_s)
            recent = (tokens[RECENT_STEPS:] - tokens[:-RECENT_STEPS]) / (at_s[RECENT_STEPS:] - at_s[:-RECENT_STEPS])
            axes.plot(x[RECENT_STEPS:], recent, color=BLUE, linewidth=2, label=f"last {RECENT_STEPS} steps")
        for number, step in enumerate(plan_steps):
            label = "another plan" if number == 0 else None
            axes.axvline(step + 1, color=INK, linewidth=1, linestyle=":", label=label)
        axes.set(xlabel="optimizer step", ylabel="LLM tokens per second")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: units.count(y)))
        _steps_axis(figure, axes)

    return svg_text("throughput", "LLM tokens per second over optimizer steps, measured", SIZE, draw)


def prediction_scatter(spans: Sequence[TimedSpan]) -> str | None:
    """SVG of predicted over measured seconds of microbatches, both axes logarithmic; None without any."""
    if not spans:
        return None
    shown = [spans[i] for i in np.unique(np.linspace(0, len(spans) - 1, MAX_POINTS).astype(int))]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        low = min(min(s.predicted_s, s.measured_s) for s in shown) / 1.2
        high = max(max(s.predicted_s, s.measured_s) for s in shown) * 1.2
        axes.plot([low, high], [low, high], color=INK, linewidth=1, label="equal")
        for module, (colour, mark) in _styles(s.module for s in shown):
            own = [s for s in shown if s.module == module]
            axes.plot(
                [s.measured_s for s in own], [s.predicted_s for s in own], color=colour, marker=mark, linewidth=0,
                markersize=3, alpha=0.6, label=module,
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        axes.set(xlabel="measured compute of a microbatch", ylabel="predicted")
        decades = math.log10(high / low)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if decades < 1.5 else (1,)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: units.seconds(value)))
            axis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
        axes.grid()
        axes.set_axisbelow(True)
        figure.legend(loc="outside lower center", ncols=4, fontsize=9)

    return svg_text("scatter", "Predicted over measured seconds of microbatches", (4.8, 3.8), draw)


def correction_curves(corrections: Sequence[Correction], plan_steps: Iterable[int] = ()) -> str | None:
    """SVG of what predicted seconds are multiplied with, over steps; None where nothing was learnt.

    Args:
        corrections: All sets of a run.
        plan_steps: At which another plan began.
    """
    if not corrections:
        return None
    ordered = sorted(corrections, key=lambda c: (c.observed_at_s, c.effective_step))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.axhline(1, color=INK, linewidth=0.8)
        for module, (colour, mark) in _styles(c.module for c in ordered):
            own = [c for c in ordered if c.module == module]
            level = _thinned(list({c.effective_step + 1: c.level for c in own}.items()))
            axes.step(
                *zip(*level, strict=True), where="post", color=colour, linewidth=2, marker=mark, markersize=3,
                label=f"{module}, typical mix",
            )  # fmt: skip
            for number, bucket in enumerate(_buckets_in_force(own)):
                label = f"{module}, sizes in force" if number == 0 else None
                axes.step(*zip(*_thinned(bucket), strict=True), where="post", color=colour, linewidth=0.8, label=label)
        for step in plan_steps:
            axes.axvline(step + 1, color=INK, linewidth=1, linestyle=":")
        axes.set(xlabel="optimizer step", ylabel="measured over predicted")
        _steps_axis(figure, axes)

    return svg_text("corrections", "Corrections of predicted seconds over optimizer steps", SIZE, draw)


def idle_bars(shares: Sequence[StageShares]) -> str | None:
    """SVG of where the time of each stage went, data-blind above balanced; None without a comparison."""
    if not shares:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        labels, at, y = [], [], 0.0
        for number, share in enumerate(shares):
            y += 1.0 if number and share.stage == shares[number - 1].stage else 1.5 * (number > 0)
            for left, length, colour, alpha in (
                (0.0, share.busy_frac, BLUE, 1.0),
                (share.busy_frac, share.wait_frac, INK, WAIT_ALPHA),
                (share.busy_frac + share.wait_frac, share.update_frac, UPDATE, 1.0),
            ):
                axes.barh(y, 100 * length, left=100 * left, color=colour, alpha=alpha, height=0.85)
            axes.text(101, y, units.percent(share.idle_frac), va="center", fontsize=9)
            labels.append(f"{share.stage}, {POLICY_NAMES[share.policy]}")
            at.append(y)
        axes.set_yticks(at, labels, fontsize=9)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set(xlim=(0, 118), xlabel="share of the step (%); right of the bars: idle")
        axes.set_xticks(range(0, 101, 25))
        handles = [
            Patch(facecolor=BLUE, label="forward + backward"),
            Patch(facecolor=INK, alpha=WAIT_ALPHA, label="waiting"),
            Patch(facecolor=UPDATE, label="reduction + optimizer"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9)

    return svg_text("idle", "Idle time per stage, data-blind and balanced", (4.8, 1.2 + 0.27 * len(shares)), draw)


def balance_bars(found: Sequence[Evenness]) -> str | None:
    """SVG of the seconds of every microbatch before and after balancing; None where no stage had work.

    A dot per data-parallel rank, a line at the mean.
    """
    stages = list(dict.fromkeys(e.stage for e in found if any(e.seconds)))
    if not stages:
        return None

    def draw(figure: Figure) -> None:
        panels = figure.subplots(len(stages), 2, squeeze=False, sharey="row", sharex=True)
        for row, stage in zip(panels, stages, strict=True):
            for even in (e for e in found if e.stage == stage):
                axes = row[0 if even.policy == ARRIVAL else 1]
                _microbatches(axes, even)
            row[0].set_ylim(bottom=0)  # of both: they share it, and it stops growing with what is drawn
            row[0].set_ylabel(f"{stage}\n(ms)", fontsize=9)
        for axes, even in zip(panels[0], found[:2], strict=False):
            axes.set_title(POLICY_NAMES[even.policy])
        for axes in panels[-1]:
            axes.set_xlabel("microbatch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))

    label = "Measured compute of every microbatch, data-blind and balanced"
    return svg_text("balance", label, (4.8, 0.8 + 1.3 * len(stages)), draw)


def memory_bars(rows: Sequence[tuple[str, int, int | None]], limit_bytes: int) -> str | None:
    """SVG of memory per process of each stage under the limit; None without a stage.

    Args:
        rows: (stage, predicted peak in bytes, measured peak or None).
        limit_bytes: Of a process.
    """
    if not rows:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        gib = 1 / 2**30
        for y, (_, predicted, measured) in enumerate(rows):
            axes.barh(y - 0.2, predicted * gib, height=0.36, facecolor="none", edgecolor=BLUE, hatch="///")
            if measured is not None:
                axes.barh(y + 0.2, measured * gib, height=0.36, color=BLUE)
        axes.axvline(limit_bytes * gib, color=INK, linewidth=1.4, linestyle="--")
        axes.set_yticks(range(len(rows)), [stage for stage, _, _ in rows], fontsize=9)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set(xlabel="peak memory of a process (GiB)")
        axes.set_xlim(left=0)
        handles = [
            Patch(facecolor="none", edgecolor=BLUE, hatch="///", label="predicted"),
            *[Patch(facecolor=BLUE, label="measured")] * any(m is not None for _, _, m in rows),
            *axes.plot([], [], color=INK, linewidth=1.4, linestyle="--", label="limit"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)

    return svg_text("memory", "Memory per stage and its limit", (4.8, 1.3 + 0.4 * len(rows)), draw)


def _microbatches(axes: Axes, even: Evenness) -> None:
    points = [(k + 1, 1e3 * s) for k, of in enumerate(even.seconds) for s in of]
    if points:
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=BLUE, linewidth=0, marker="o", markersize=3.5)
        axes.axhline(float(np.mean(y)), color=INK, linewidth=1, linestyle=":")
    axes.grid(axis="y")
    axes.set_axisbelow(True)


def _buckets_in_force(corrections: Sequence[Correction]) -> list[list[tuple[int, float]]]:
    """Per bucket of sizes that plans were ever made otherwise for: (step, factor) as it was applied."""
    found: dict[int, list[Correction]] = {}
    for c in corrections:
        found.setdefault(c.min_tokens, []).append(c)
    several = {c.min_tokens for c in corrections if c.min_tokens > 0}
    return [
        [(c.effective_step + 1, c.factor if c.is_in_force else c.level) for c in bucket]
        for bucket in found.values()
        if several and any(c.is_in_force for c in bucket)
    ]


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Some of the points of a line, its first and its last among them."""
    chosen = np.unique(np.linspace(0, len(points) - 1, MAX_LINE_POINTS).astype(int))
    return [points[i] for i in chosen]


def _styles(modules: Iterable[str]) -> list[tuple[str, tuple[str, str]]]:
    """Per module its colour and mark, the LLM last."""
    names = sorted(set(modules), key=lambda name: (name == LLM, name))
    others = iter(OTHER_STYLES * (1 + len(names)))
    return [(name, MODULE_STYLES[name] if name in MODULE_STYLES else next(others)) for name in names]


def _steps_axis(figure: Figure, axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
