"""What a suite draws: bars of the paper's models, lines over what a sweep varies."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dflop.compare.suite.contest import EXPERTS, OURS, REFERENCE, RIVALS, TUNED, Contest, by_mixture
from dflop.compare.suite.sweeps import Point
from dflop.errors import ConfigError
from dflop.report.html_page import Drawing
from dflop.report.suite_plots import BOUND, Panel, Series, bars, lines

SHOWN = (TUNED, REFERENCE, *EXPERTS, OURS)
X_LABELS = {
    "strong": "nodes of 8 GPUs, 512 samples per step",
    "weak": "nodes of 8 GPUs, 64 samples per node and step",
    "balance": "factor on the encoder's cost",
    "noise": "unpredicted noise per item",
}
TITLES = {
    "": "paper's models",
    "strong": "scaling",
    "weak": "scaling",
    "balance": "balance of encoder and LLM",
    "noise": "costs that deviate from their predictions",
}


def save_picture(points: Sequence[Point], path: Path) -> None:
    """Draws a suite; the title says that it is simulated, and with which costs.

    Raises:
        ConfigError: the suffix of the path is none that can be drawn, or nothing has a baseline.
    """
    points = _measured(points)
    if not points:
        raise ConfigError(f"nothing to draw in {path}: speedups are over a baseline, and none fits in memory")
    contests, sweep = [point.found for point in points], points[0].sweep
    title = f"Simulated, {TITLES[sweep]}; costs {contests[0].setting.cost_name}"
    if sweep:
        picture = lines("lines", title, _panels(points))
    else:
        groups = ["\n".join((*c.setting.name.split(" + "), c.setting.mixture)) for c in contests]
        picture = bars("bars", title, groups, _series(contests, (*RIVALS, OURS)), _bounds(contests))
    picture.save(path, title)


def drawings(points: Sequence[Point]) -> tuple[Drawing, ...]:
    """For a page: bars per kind of data, or a diagram per panel."""
    points, drawn = _measured(points), []
    if points and points[0].sweep:
        for i, panel in enumerate(_panels(points)):
            svg = lines(f"lines{i}", panel.title, [replace(panel, title="")]).svg()  # the page has the title
            drawn.append(Drawing(svg, f"{panel.title}: {panel.y_label} over {panel.x_label}."))
        return tuple(drawn)
    for number, (mixture, of) in enumerate(by_mixture([point.found for point in points])):
        groups = ["\n".join(textwrap.wrap(c.setting.name, 16)) for c in of]
        what = f"Times as fast as the baseline on data `{mixture}`; lines: what no plan of a case can exceed"
        svg = bars(f"bars{number}", what, groups, _series(of, (*RIVALS, OURS)), _bounds(of)).svg()
        drawn.append(Drawing(svg, f"{what}; whiskers: 95 % intervals.", is_wide=True))
    return tuple(drawn)


def _measured(points: Sequence[Point]) -> list[Point]:
    """Those with a baseline."""
    return [point for point in points if point.found.baseline]


def _panels(points: Sequence[Point]) -> list[Panel]:
    """A diagram per model, data and sweep; with scaling also samples per GPU."""
    panels = []
    for line in dict.fromkeys(point.line for point in points):
        name, mixture, sweep = line
        on_it = [point for point in points if point.line == line]
        is_scaling, contests, x = sweep in ("strong", "weak"), [p.found for p in on_it], tuple(p.x for p in on_it)
        title, x_label = f"{name}, {mixture}" + f", {sweep} scaling" * is_scaling, X_LABELS[sweep]
        series = (Series(BOUND, _bounds(contests)), *_series(contests, SHOWN))
        panels.append(Panel(title, x_label, x, "times as fast as the baseline", series, x_is_frac=sweep == "noise"))
        if is_scaling:
            sizes = [c.setting.problem.global_batch_size / c.setting.num_gpus for c in contests]
            bound = tuple(size / statistics.fmean(c.bound_s) for size, c in zip(sizes, contests, strict=True))
            baseline = tuple(p.throughput(p.found.baseline) for p in on_it if p.found.baseline)
            ours = tuple(p.throughput(OURS) for p in on_it)
            series = (Series(BOUND, bound), Series("baseline", baseline), Series(OURS, ours))
            panels.append(Panel(title, x_label, x, "samples per second and GPU", series, y_from_zero=True))
    return panels


def _series(contests: Sequence[Contest], names: Sequence[str]) -> list[Series]:
    """Speedups of competitors, ours with its intervals."""
    found, pairs = [], [(c, c.baseline) for c in contests]
    for name in names:
        speedups = (c.speedup(name, baseline) for c, baseline in pairs)
        mean, low, high = zip(*((s.mean, s.low, s.high) for s in speedups), strict=True)
        found.append(Series(name, mean, low, high) if name == OURS else Series(name, mean))
    return found


def _bounds(contests: Sequence[Contest]) -> tuple[float, ...]:
    return tuple(c.bound_over(c.baseline) for c in contests)
