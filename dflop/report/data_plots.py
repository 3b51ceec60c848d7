"""What a data profile looks like: how long its samples are, and how that is spread over modules. Terminal, PNG, SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from rich.console import Console
from rich.text import Text

from dflop import units
from dflop.data.distribution import quantiles
from dflop.records import LLM
from dflop.report.plots import check_suffix, legend, tell_ticks

# Okabe-Ito: distinct with any common kind of colour blindness. One colour per modality group.
GROUP_COLOURS = {
    "text": "#999999",
    "single_image": "#56B4E9",
    "multi_image": "#0072B2",
    "video": "#E69F00",
    "audio": "#009E73",
    "mixed": "#CC79A7",
}
BAR_WIDTH = 40
SHADES = " ░▒▓█"

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Profile:
    """A data profile as columns, one entry per sample."""

    title: str
    group: Sequence[str]
    tokens: Mapping[str, Ints]
    """Per module: tokens of each sample; 0 where it has no work for the module."""
    weight: Floats
    """Expected draws of each sample per epoch; 1 without a mixture's weights."""

    @property
    def encoders(self) -> list[str]:
        return [module for module in self.tokens if module != LLM]


def save_plots(profile: Profile, path: Path) -> None:
    """Draws histograms per module, stacked by modality group, and LLM tokens against each encoder's.

    Raises:
        ConfigError: the suffix is none of `SUFFIXES`.
        OSError: the file cannot be written.
    """
    check_suffix(path)
    modules = [LLM, *profile.encoders]
    figure = Figure(figsize=(4.6 * len(modules), 6.6 if profile.encoders else 3.6), layout="constrained")
    figure.suptitle(profile.title, fontsize=11)
    axes = figure.subplots(2 if profile.encoders else 1, len(modules), squeeze=False)
    groups = np.array(profile.group)
    present = [g for g in GROUP_COLOURS if (groups == g).any()] or ["text"]
    for column, module in enumerate(modules):
        tokens = profile.tokens[module]
        worked = tokens > 0
        axes[0, column].hist(
            [tokens[worked & (groups == g)] for g in present],
            bins=_edges(tokens[worked], per_octave=4),
            weights=[profile.weight[worked & (groups == g)] for g in present],
            stacked=True,
            color=[GROUP_COLOURS[g] for g in present],
            label=[g.replace("_", " ") for g in present],
        )
        axes[0, column].set(xlabel=f"{module} tokens per sample", ylabel="samples per epoch", title=module)
        _octaves(axes[0, column], "x")
    if profile.encoders:
        legend(figure)
        words = axes[1, 0]
        words.axis("off")
        words.text(-0.1, 1, _words(profile), va="top", fontsize=9, family="monospace", transform=words.transAxes)
    for column, module in enumerate(profile.encoders, start=1):
        both = profile.tokens[module] > 0
        drawn = axes[1, column]
        if both.any():
            x, y = profile.tokens[module][both], profile.tokens[LLM][both]
            edges, weights = [_edges(x, 4), _edges(y, 4)], profile.weight[both]
            *_, shown = drawn.hist2d(x, y, edges, weights=weights, cmin=1e-9, norm=LogNorm(), cmap="cividis_r")
            bar = figure.colorbar(shown, ax=drawn, label="samples per epoch")
            bar.ax.yaxis.set_minor_locator(NullLocator())
            tell_ticks(bar.ax.yaxis, _tick)
        drawn.set(xlabel=f"{module} tokens per sample", ylabel=f"{LLM} tokens per sample")
        _octaves(drawn, "x", "y")
    figure.savefig(path, dpi=110)


def _octaves(axes: Axes, *names: str) -> None:
    """Logarithmic axes whose ticks are powers of two, as people think of token counts."""
    for name in names:
        getattr(axes, f"set_{name}scale")("log", base=2)
        axis = getattr(axes, f"{name}axis")
        axis.set_major_locator(LogLocator(2, numticks=8))
        axis.set_minor_locator(NullLocator())
        tell_ticks(axis, _tick)


def print_plots(profile: Profile, console: Console) -> None:
    """The same for a terminal: bars per power of two, and a shaded square of LLM against encoder tokens."""
    for module in [LLM, *profile.encoders]:
        tokens = profile.tokens[module]
        worked, weight = tokens[tokens > 0], profile.weight[tokens > 0]
        if not len(worked):
            continue
        drawn = float(worked @ weight)
        share = drawn / max(1.0, sum(float(t @ profile.weight) for t in profile.tokens.values()))
        console.print(
            Text(f"\n{module}: {len(worked)} samples, {units.count(round(drawn))} tokens an epoch ({share:.0%})")
        )
        edges = _edges(worked, per_octave=1)
        counts, _ = np.histogram(worked, edges, weights=weight)
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
            bar = "█" * round(BAR_WIDTH * count / counts.max()) or ("▏" if count else "")
            label = f"{_tick(low):>6} - {_tick(high):<6}"
            console.print(Text(f"{label} {bar:<{BAR_WIDTH}} {round(count)}"), no_wrap=True)
    for module in profile.encoders:
        both = profile.tokens[module] > 0
        if both.any():
            drawn_tokens = profile.tokens[module][both], profile.tokens[LLM][both]
            _print_joint(module, *drawn_tokens, profile.weight[both], console)


def _print_joint(module: str, encoder: Ints, llm: Ints, weight: Floats, console: Console) -> None:
    columns, rows = _edges(encoder, per_octave=2), _edges(llm, per_octave=1)
    counts, _, _ = np.histogram2d(encoder, llm, [columns, rows], weights=weight)
    # Shades go with the logarithm: a hundred samples next to ten thousand are still to be seen.
    level = np.ceil(np.log1p(counts) / np.log1p(counts.max()) * (len(SHADES) - 1)).astype(int)
    console.print(Text(f"\n{LLM} tokens (down) by {module} tokens (across), darker is more samples"))
    for row in range(len(rows) - 2, -1, -1):
        cells = "".join(SHADES[n] * 2 for n in level[:, row])
        console.print(Text(f"{_tick(rows[row]):>8} │{cells}"), no_wrap=True)
    ends = f"{_tick(columns[0])}{_tick(columns[-1]):>{2 * len(level) - len(_tick(columns[0]))}}"
    console.print(Text(f"{'':>8} └{'──' * len(level)}\n{'':>9} {ends}"), no_wrap=True)


def _edges(values: Ints, per_octave: int) -> npt.NDArray[np.float64]:
    """Bin edges at (fractions of) powers of two around all values; none of them 0."""
    if not len(values):
        return np.array([1.0, 2.0])
    first, last = np.floor(np.log2(values.min())), np.floor(np.log2(values.max())) + 1
    return np.asarray(2.0 ** np.linspace(first, last, int(last - first) * per_octave + 1), np.float64)


def _words(profile: Profile) -> str:
    lines = [f"{len(profile.group)} samples", ""]
    for module, tokens in profile.tokens.items():
        worked = tokens > 0
        if worked.any():
            p50, p90, p99 = quantiles(tokens[worked], profile.weight[worked], (0.5, 0.9, 0.99))
            lines.append(f"{module:<8} p50 {_tick(p50):>6} p90 {_tick(p90):>6} p99 {_tick(p99):>6}")
    return "\n".join(lines)


def _tick(value: float) -> str:
    return units.count(round(value))
