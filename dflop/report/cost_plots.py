"""What a cost table says and what was measured: curves with points, residuals with noise. Terminal, PNG, SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dflop import units
from dflop.cost.model import CostModel
from dflop.records import TRAINS_ADAPTERS, TRAINS_NONE, TRAINS_PROJECTOR, CostTable, Measurement
from dflop.report.plots import check_suffix, legend, tell_ticks

# Okabe-Ito, one colour and one mark per probe group.
GROUP_MARKS = {
    "random": ("#0072B2", "o"),
    "length_sorted": ("#E69F00", "s"),
    "tile_sorted": ("#009E73", "^"),
    "single": ("#999999", "v"),
    "adaptive": ("#CC79A7", "D"),
}
NUM_BINS = 6

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fitted:
    """A cost table and the probes it was fitted to."""

    table: CostTable
    probes: tuple[Measurement, ...]

    @property
    def title(self) -> str:
        t = self.table
        return f"{t.module}, tp {t.tp}, {_way(t)}, {t.source}"

    @property
    def measured_s(self) -> Floats:
        """Forward + backward seconds of the probes."""
        return np.array([p.forward_s + p.backward_s for p in self.probes])

    @property
    def predicted_s(self) -> Floats:
        """The table's forward + backward seconds for the same probes."""
        return np.array([self.seconds(p.num_items, p.num_tokens, p.sum_sq_tokens, p.num_layers) for p in self.probes])

    @property
    def noise_frac(self) -> Floats:
        """Spread of each probe over its repeats, relative."""
        spread = np.array([p.forward_spread_s + p.backward_spread_s for p in self.probes])
        return spread / np.maximum(self.measured_s, 1e-12)

    def seconds(self, num_items: float, num_tokens: float, sum_sq_tokens: float, num_layers: int) -> float:
        """Forward + backward seconds of so many layers and the edge."""
        t = self.table
        model = CostModel([t], extrapolate=True)
        load = num_items, num_tokens, sum_sq_tokens
        forward, backward = model.module_seconds(t.module, load, t.mode, num_layers=num_layers, edge=True)
        return float(forward + backward)


def fitted(tables: Sequence[CostTable], measurements: Sequence[Measurement]) -> list[Fitted]:
    """Pairs tables with the probes that ran the same way; probes that ran out of memory are left out."""

    def way(row: CostTable | Measurement) -> tuple[object, ...]:
        return (row.module, row.tp, row.is_frozen, row.recompute, row.hardware, row.software, row.dtype)

    return [Fitted(t, tuple(m for m in measurements if way(m) == way(t) and m.status == "ok")) for t in tables]


def _way(table: CostTable) -> str:
    trains = {TRAINS_NONE: "frozen", TRAINS_PROJECTOR: "projector", TRAINS_ADAPTERS: "adapters"}.get(table.trains, "")
    return "+".join(filter(None, (trains, "recompute" * table.recompute))) or "train"


COLUMNS = (
    "module", "tp", "way", "source", "layers", "probes", "tokens", "median_error", "p95_error", "noise",
    "per_layer_1k_tokens", "fixed_per_layer",
)  # fmt: skip


def table_rows(found: Sequence[Fitted]) -> list[tuple[object, ...]]:
    """Rows of `COLUMNS`, one per cost table; times are forward + backward."""
    rows: list[tuple[object, ...]] = []
    for f in found:
        t = f.table
        middle = 1000.0 if not t.max_tokens else min(1000.0, t.max_tokens)
        length = t.max_mean_length / 2
        layer_s = f.seconds(0, middle, middle * length, 1) - f.seconds(0, middle, middle * length, 0)
        rows.append((
            t.module, t.tp, _way(t), t.source, t.num_layers, t.num_measurements,
            f"{units.count(t.min_tokens)} to {units.count(t.max_tokens)}", units.percent(t.median_error_frac),
            units.percent(t.p95_error_frac), units.percent(t.noise_frac),
            units.seconds(layer_s * 1000 / middle), units.seconds(t.forward_s.layer_fixed + t.backward_s.layer_fixed),
        ))  # fmt: skip
    return rows


RESIDUAL_COLUMNS = ("module", "layers", "tokens", "probes", "measured", "predicted", "residual", "noise")


def residual_rows(found: Fitted) -> list[tuple[object, ...]]:
    """Rows of `RESIDUAL_COLUMNS`: probes in bins of equal count by tokens, per depth; medians within a bin."""
    rows: list[tuple[object, ...]] = []
    for depth in sorted({p.num_layers for p in found.probes}):
        chosen = np.array([p.num_layers == depth for p in found.probes])
        tokens = np.array([p.num_tokens for p in found.probes])[chosen]
        measured, predicted, noise = (v[chosen] for v in (found.measured_s, found.predicted_s, found.noise_frac))
        order = np.argsort(tokens, kind="stable")
        for part in np.array_split(order, min(NUM_BINS, len(order))):
            rows.append((
                found.table.module, depth, f"{units.count(tokens[part].min())} to {units.count(tokens[part].max())}",
                len(part), units.seconds(float(np.median(measured[part]))),
                units.seconds(float(np.median(predicted[part]))),
                f"{np.median(predicted[part] / measured[part] - 1) * 100:+.1f} %",
                units.percent(float(np.median(noise[part]))),
            ))  # fmt: skip
    return rows


def save_cost_plots(found: Sequence[Fitted], path: Path, title: str) -> None:
    """Draws per table: seconds over tokens with the fitted curve, and residuals with the repeat-to-repeat noise.

    Raises:
        ConfigError: the suffix of the path is none that can be drawn.
        OSError: the file cannot be written.
    """
    check_suffix(path)
    figure = Figure(figsize=(4.8 * len(found), 6.4), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(2, len(found), squeeze=False)
    for column, of_table in enumerate(found):
        _curve(axes[0, column], of_table)
        _residuals(axes[1, column], of_table)
    legend(figure)
    figure.savefig(path, dpi=110)


def _curve(axes: Axes, found: Fitted) -> None:
    t = found.table
    axes.set_title(found.title, fontsize=10)
    if not found.probes and t.max_tokens:
        tokens = np.geomspace(max(1, t.min_tokens), t.max_tokens, 80)
        curve = [found.seconds(1, n, n * t.max_mean_length / 2, 1) for n in tokens]
        axes.plot(tokens, curve, color="black", linewidth=1, label=f"{t.source}, 1 layer")
    for depth, style in zip(sorted({p.num_layers for p in found.probes}), ("-", "--", ":"), strict=False):
        probes = [p for p in found.probes if p.num_layers == depth]
        # The curve is drawn for groups of the usual make-up; points lie off it where theirs differs.
        length = float(np.median([p.sum_sq_tokens / p.num_tokens for p in probes]))
        per_item = float(np.median([p.num_tokens / max(1, p.num_items) for p in probes]))
        tokens = np.geomspace(min(p.num_tokens for p in probes), max(p.num_tokens for p in probes), 80)
        curve = [found.seconds(n / per_item, n, n * length, depth) for n in tokens]
        axes.plot(tokens, curve, style, color="black", linewidth=1, label=f"fit, {depth} layer{'s' * (depth > 1)}")
    _points(axes, found, found.measured_s)
    axes.set(yscale="log", ylabel="forward + backward")
    tell_ticks(axes.yaxis, units.seconds)


def _residuals(axes: Axes, found: Fitted) -> None:
    off = found.predicted_s / found.measured_s - 1
    tokens = [p.num_tokens for p in found.probes]
    axes.axhline(0, color="black", linewidth=0.8)
    axes.errorbar(tokens, off, found.noise_frac, fmt="none", ecolor="#bbbbbb", linewidth=1, label="spread of repeats")
    _points(axes, found, off)
    axes.set(ylabel="predicted / measured - 1")
    tell_ticks(axes.yaxis, lambda y: f"{y * 100:+.0f} %")


def _points(axes: Axes, found: Fitted, y: Floats) -> None:
    """A mark per probe over its tokens, by group."""
    tokens, groups = np.array([p.num_tokens for p in found.probes]), np.array([p.group for p in found.probes], str)
    for group, (colour, mark) in GROUP_MARKS.items():
        if (own := groups == group).any():
            axes.scatter(tokens[own], y[own], s=14, color=colour, marker=mark, label=group.replace("_", " "))
    axes.set(xscale="log", xlabel="tokens in the group")
    tell_ticks(axes.xaxis, units.count)
