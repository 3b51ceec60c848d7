"""How a run went, as drawings for its page: loss, throughput, policies, predictions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator

from dflop import units
from dflop.records import LLM
from dflop.report.comparison import Comparison, PolicyStats
from dflop.report.observed_steps import MeasuredStep
from dflop.report.plots import BLUE, GREY, INK, SKY, Picture, legend, tell_ticks
from dflop.report.stage_stats import TimedSpan
from dflop.report.tables import POLICY_NAMES

SIZE = (4.8, 3.0)
SMOOTHED_STEPS = 5
RECENT_STEPS = 10
"""As `recent_llm_tokens_per_s` of the view `v_throughput`."""
MAX_MARKERS = 1500
"""Most markers of a line or a scatter: a marker is a hundred bytes, and thousands hide one another."""
MODULE_STYLES = {"llm": ("#0072B2", "o"), "vision": ("#D55E00", "s"), "audio": ("#009E73", "^")}
OTHER_STYLES = (("#CC79A7", "D"), ("#E69F00", "P"), ("#56B4E9", "X"))


def loss_curve(steps: Sequence[MeasuredStep], validation: Mapping[int, float] = MappingProxyType({})) -> str | None:
    """SVG of the measured loss per training step, with a gap where a step has none; None without a step.

    `validation` is the loss of held-out samples, by the step after which it was measured.
    """
    if not steps:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        x, y = [s.step for s in steps], [math.nan if s.loss is None else s.loss for s in steps]
        axes.plot(x, y, color=SKY, linewidth=1, marker=".", markersize=4, markevery=_every(x), label="step")
        if len(y) >= 4 * SMOOTHED_STEPS:
            known = [(s.step, s.loss) for s in steps if s.loss is not None]
            at, loss = [step for step, _ in known], [value for _, value in known]
            mean = [np.mean(loss[max(0, i + 1 - SMOOTHED_STEPS) : i + 1]) for i in range(len(loss))]
            axes.plot(at, mean, color=BLUE, linewidth=2, label=f"mean of last {SMOOTHED_STEPS}")
        if validation:
            axes.plot(*zip(*validation.items(), strict=True), color=INK, linewidth=1, marker="D", label="validation")
        axes.set(xlabel="optimizer step, from 0", ylabel="loss (nats per token)")
        _steps_axis(figure, axes)

    return Picture("loss", "Loss per optimizer step, measured", SIZE, draw).svg()


def throughput_curve(steps: Sequence[MeasuredStep], plan_steps: Iterable[int] = ()) -> str | None:
    """SVG of LLM tokens per second over training, and where other plans began; None where no step knows its tokens."""
    known = [(s.step, s.llm_tokens_per_s, s.step_s) for s in steps if not math.isnan(s.llm_tokens_per_s)]
    if not known:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        x, speed, step_s = (np.array(column, dtype=float) for column in zip(*known, strict=True))
        axes.plot(x, speed, color=SKY, linewidth=0, marker=".", markersize=5, markevery=_every(known), label="step")
        if len(x) >= 2 * RECENT_STEPS:
            tokens, at_s = np.cumsum(speed * step_s), np.cumsum(step_s)
            recent = (tokens[RECENT_STEPS:] - tokens[:-RECENT_STEPS]) / (at_s[RECENT_STEPS:] - at_s[:-RECENT_STEPS])
            axes.plot(x[RECENT_STEPS:], recent, color=BLUE, linewidth=2, label=f"last {RECENT_STEPS} steps")
        for number, step in enumerate(plan_steps):
            label = "new plan" if number == 0 else None
            axes.axvline(step, color=INK, linewidth=1, linestyle=":", label=label)
        axes.set(xlabel="optimizer step, from 0", ylabel="LLM tokens per second")
        axes.set_ylim(bottom=0)
        tell_ticks(axes.yaxis, units.count)
        _steps_axis(figure, axes)

    return Picture("throughput", "LLM tokens per second over optimizer steps, measured", SIZE, draw).svg()


def step_time_bars(comparison: Comparison) -> str:
    """SVG of the step time of every policy, measured and simulated, in ms: bars as long as the table's numbers."""

    def draw(figure: Figure) -> None:
        axes, labels = figure.subplots(), list[str]()
        ends_ms = [_policy_bars(axes, 2 * i, policy) for i, policy in enumerate(comparison.policies)]
        for policy in comparison.policies:
            labels += [f"{POLICY_NAMES[policy.policy]}\n{how}" for how in ("measured", "simulated")]
        axes.set_yticks(range(len(labels)), labels, fontsize=9)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.grid(axis="x")
        axes.set_axisbelow(True)
        axes.set(xlabel="time per step (ms), geometric mean over batches", xlim=(0, 1.22 * max(ends_ms)))
        times = {"forward + backward": BLUE, "reduction + optimizer (not simulated)": GREY}
        legend(figure, {name: Patch(facecolor=colour) for name, colour in times.items()})

    return Picture("bars", "Step time by policy, measured and simulated", (5.2, 3.0), draw).svg()


def prediction_scatter(spans: Sequence[TimedSpan]) -> str | None:
    """SVG of predicted over measured seconds of microbatches, both axes logarithmic; None without any."""
    if not spans:
        return None
    shown = [spans[i] for i in np.unique(np.linspace(0, len(spans) - 1, MAX_MARKERS).astype(int))]

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
            tell_ticks(axis, units.seconds)
        axes.grid()
        axes.set_axisbelow(True)
        legend(figure)

    return Picture("scatter", "Predicted / measured seconds of microbatches", (4.8, 3.8), draw).svg()


def _policy_bars(axes: Axes, y: int, policy: PolicyStats) -> float:
    """Draws the measured and the simulated bar; returns where they end, error bar included."""
    pipeline_ms, step_ms, predicted_ms = 1e3 * policy.pipeline_s, 1e3 * policy.step_s, 1e3 * policy.predicted_step_s
    q1_ms, q3_ms = 1e3 * policy.step_q1_s, 1e3 * policy.step_q3_s
    axes.barh(y, pipeline_ms, color=BLUE)
    axes.barh(y, max(0.0, step_ms - pipeline_ms), left=pipeline_ms, color=GREY)
    spread = [[max(0.0, step_ms - q1_ms)], [max(0.0, q3_ms - step_ms)]]
    axes.errorbar(step_ms, y, xerr=spread, color=INK, capsize=3, linewidth=1)
    axes.barh(y + 1, predicted_ms, facecolor="none", edgecolor=BLUE, hatch="///", linewidth=1.5)
    for bar, end_ms, value_ms in ((y, max(step_ms, q3_ms), step_ms), (y + 1, predicted_ms, predicted_ms)):
        axes.annotate(units.seconds(value_ms / 1e3), (end_ms, bar), (5, 0), textcoords="offset points", va="center")
    return max(step_ms, q3_ms, predicted_ms)


def _every(points: Sequence[object]) -> int:
    """Every which point of a line gets a marker."""
    return max(1, -(-len(points) // MAX_MARKERS))


def _styles(modules: Iterable[str]) -> list[tuple[str, tuple[str, str]]]:
    """Per module its colour and mark, the LLM last."""
    names = sorted(set(modules), key=lambda name: (name == LLM, name))
    others = iter(OTHER_STYLES * (1 + len(names)))
    return [(name, MODULE_STYLES[name] if name in MODULE_STYLES else next(others)) for name in names]


def _steps_axis(figure: Figure, axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    if len(axes.lines) > 1:
        legend(figure)
