"""`--suite scaling`, `balance` and `noise`: how the gain depends on cluster, model and unpredicted costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflop.compare.suite.cases import CASES, GLOBAL_BATCH_SIZE, NUM_NODES, NUM_UNSEEN, Case, Setting, make_setting
from dflop.compare.suite.contest import (
    BATCHES,
    OURS,
    REFERENCE,
    TOKEN_LPT,
    TUNED,
    Contest,
    compete,
    contest,
    encoder_share,
    make_contestants,
)
from dflop.compare.suite.mixtures import HEAVY, MAIN
from dflop.compare.suite.paper import contest_numbers, title_of
from dflop.compare.suite.unseen_batches import Noise
from dflop.errors import InfeasiblePlanError
from dflop.report.html_page import Drawing
from dflop.report.suite_plots import BOUND, Panel, Series, line_svg, save_lines
from dflop.run.messages import Say
from dflop.units import percent, ratio, seconds

NODES = (1, 2, 4, 8, 16, 32, 64, 128)
FACTORS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)
SIGMAS = (0.0, 0.05, 0.10, 0.15, 0.20, 0.25)
SHOWN = (REFERENCE, TOKEN_LPT, BATCHES, OURS)
NUM_LARGE_UNSEEN = 3
"""Unseen batches of clusters beyond 16 nodes: they are large there."""
COLUMNS = (
    "model", "data", "sweep", "at", "uniform tuned", *SHOWN, "95 %", "bound", "idle tuned", "idle dflop",
    "samples/s/GPU tuned", "samples/s/GPU dflop",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of a sweep."""

    sweep: str
    x: float
    label: str
    found: Contest

    @property
    def line(self) -> tuple[str, str, str]:
        """What is joined up in a diagram: (model, data, sweep)."""
        return self.found.setting.name, self.found.setting.mixture, self.sweep

    def throughput(self, name: str) -> float:
        """Samples per second and GPU."""
        setting = self.found.setting
        return setting.problem.global_batch_size / (self.found.steps[name].mean_s * setting.num_gpus)


def run_scaling(say: Say, case: Case = CASES[0], nodes: Sequence[int] = NODES) -> list[Point]:
    """Strong scaling (one global batch for all cluster sizes) and weak (as many samples per GPU everywhere)."""
    each = GLOBAL_BATCH_SIZE // NUM_NODES
    points = []
    for sweep in ("strong", "weak"):
        for n in nodes:
            setting = make_setting(
                case,
                MAIN,
                num_nodes=n,
                global_batch_size=GLOBAL_BATCH_SIZE if sweep == "strong" else each * n,
                num_unseen=NUM_UNSEEN if n <= 16 else NUM_LARGE_UNSEEN,
            )
            points += _points(say, sweep, float(n), f"{n} nodes", setting)
    return points


def run_balance(say: Say, case: Case = CASES[0], factors: Sequence[float] = FACTORS) -> list[Point]:
    """The encoder an eighth to eight times as expensive, all else equal."""
    points = []
    for mixture in (MAIN, HEAVY):
        for factor in factors:
            setting = make_setting(case, mixture, encoder_factor=factor)
            label = f"encoder x {factor:g}, {percent(encoder_share(setting.problem))} of the work"
            points += _points(say, "balance", factor, label, setting)
    return points


def run_noise(say: Say, cases: Sequence[Case] = CASES[:2], sigmas: Sequence[float] = SIGMAS) -> list[Point]:
    """Plans and schedules from clean costs, executed with items that cost more or less than predicted."""
    points = []
    for case in cases:
        for mixture in (MAIN, HEAVY):
            setting = make_setting(case, mixture)
            say(f"{case.name}, {mixture.name}")
            plans = make_contestants(setting.problem, say)
            for sigma in sigmas:
                found = compete(setting, plans, noise=Noise(sigma, seed=2))
                points.append(Point("noise", sigma, f"{sigma * 100:.0f} % noise per item", found))
    return points


def _points(say: Say, sweep: str, x: float, label: str, setting: Setting) -> list[Point]:
    """One point, or none where nothing fits."""
    say(f"{setting.name}, {setting.mixture}, {sweep}, {label}")
    try:
        return [Point(sweep, x, label, contest(setting, say))]
    except InfeasiblePlanError as error:
        say(f"{label}: {error}")
        return []


def sweep_rows(points: Sequence[Point]) -> list[tuple[str, ...]]:
    """Rows of `COLUMNS`."""
    return [_row(point) for point in points]


def _row(point: Point) -> tuple[str, ...]:
    found, ours = point.found, point.found.speedup(OURS)
    return (
        *point.line,
        point.label,
        seconds(found.steps[TUNED].mean_s),
        *(ratio(_value(found, name)) for name in SHOWN),
        f"{ours.low:.2f}-{ours.high:.2f}" if ours and ours.has_interval else "-",
        ratio(found.bound_speedup),
        percent(found.steps[TUNED].mean_idle_frac),
        percent(found.steps[OURS].mean_idle_frac),
        f"{point.throughput(TUNED):.3f}",
        f"{point.throughput(OURS):.3f}",
    )


def _value(found: Contest, name: str) -> float:
    speedup = found.speedup(name)
    return speedup.mean if speedup else math.nan


def sweep_numbers(points: Sequence[Point]) -> list[dict[str, object]]:
    """Everything in full, for programs."""
    numbers = contest_numbers([point.found for point in points])
    return [
        {"sweep": point.sweep, "x": point.x, "label": point.label, **more}
        for point, more in zip(points, numbers, strict=True)
    ]


X_LABELS = {
    "strong": "nodes of 8 GPUs, 512 samples per step",
    "weak": "nodes of 8 GPUs, 64 samples per node and step",
    "balance": "encoder's cost, times its own",
    "noise": "unpredicted noise per item",
}
TITLES = {
    "strong": "scaling",
    "weak": "scaling",
    "balance": "balance of encoder and LLM",
    "noise": "costs that stray from their predictions",
}


def save_sweep_plot(points: Sequence[Point], path: Path) -> None:
    """Speed-ups over the swept quantity, a diagram per panel.

    Raises:
        ConfigError: the suffix of the path is none that can be drawn.
    """
    save_lines(sweep_panels(points), path, title_of(points[0].found, TITLES[points[0].sweep]))


def sweep_panels(points: Sequence[Point]) -> list[Panel]:
    """A diagram per model, data and sweep; with scaling also samples per GPU."""
    panels = []
    for line in dict.fromkeys(point.line for point in points):
        on_it = [point for point in points if point.line == line]
        panels.append(_speedup_panel(on_it))
        if line[2] in ("strong", "weak"):
            panels.append(_throughput_panel(on_it))
    return panels


def sweep_drawings(points: Sequence[Point]) -> list[Drawing]:
    """The diagrams for a page."""
    return [
        Drawing(line_svg(f"lines{i}", panel), f"{panel.title}: {panel.y_label} over {panel.x_label}.")
        for i, panel in enumerate(sweep_panels(points))
    ]


def _speedup_panel(points: Sequence[Point]) -> Panel:
    sweep = points[0].sweep
    found = [point.found for point in points]
    ours = [contest.speedup(OURS) for contest in found]
    series = [Series(BOUND, tuple(c.bound_speedup for c in found))]
    series += [Series(shown, tuple(_value(c, shown) for c in found)) for shown in SHOWN if shown != OURS]
    series.append(
        Series(
            OURS,
            tuple(s.mean if s else math.nan for s in ours),
            tuple(s.low if s else math.nan for s in ours),
            tuple(s.high if s else math.nan for s in ours),
        )
    )
    return Panel(
        _title(points[0]),
        X_LABELS[sweep],
        tuple(point.x for point in points),
        "times as fast as uniform tuned",
        tuple(series),
        x_is_log2=sweep != "noise",
        x_is_frac=sweep == "noise",
    )


def _throughput_panel(points: Sequence[Point]) -> Panel:
    sweep = points[0].sweep
    sizes = [point.found.setting.problem.global_batch_size / point.found.setting.num_gpus for point in points]
    bound = [
        size / statistics.fmean(point.found.bound_s) for size, point in zip(sizes, points, strict=True)
    ]  # fmt: skip
    return Panel(
        _title(points[0]),
        X_LABELS[sweep],
        tuple(point.x for point in points),
        "samples per second and GPU",
        (
            Series(BOUND, tuple(bound)),
            *(Series(shown, tuple(point.throughput(shown) for point in points)) for shown in (TUNED, OURS)),
        ),
        y_from_zero=True,
    )


def _title(point: Point) -> str:
    name, mixture, sweep = point.line
    return f"{name}, {mixture}" + (f", {sweep} scaling" if sweep in ("strong", "weak") else "")
