"""The joint distribution of a dataset's shapes: its summary for people, batches of it for the planner.

Planning on means is what data-blind systems do; here every number stays attached to its sample, so the correlations
that make batches uneven (long videos with short texts, many images with long answers) survive into the plan.

How far apart two datasets are is told per module by the Kolmogorov-Smirnov distance of their tokens per sample (the
largest difference between their cumulative shares), and by the total variation of the shares of modality groups. Both
lie in 0..1 and need no bins or units. With each stands the distance that chance alone exceeds once in twenty draws of
samples of these sizes from one distribution; a drift is what lies beyond all chance *and* beyond a threshold, since
with a million samples differences that no plan would feel are significant too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from dflop.errors import DataError
from dflop.records import LLM, SampleShape

_ROUNDING = 1e-12
"""Slack of cumulative shares: ten tenths summed up are a little less than 1."""

ALPHA = 0.05
"""How often chance may look like a drift, over all quantities together."""

Floats = npt.NDArray[np.float64]
GROUPS = ("text", "single_image", "multi_image", "video", "audio", "mixed")
"""Groups of samples by their media, as `sql/queries/profile_samples.sql` sorts them."""


def summary(frame: pl.DataFrame) -> pl.DataFrame:
    """Quantiles of tokens per modality group and module, of a `profile_frame`, by the samples' weights.

    Returns:
        Columns `group`, `module`, `num_samples`, `p50_tokens`, `p90_tokens`, `p99_tokens`, `max_tokens`; one row per
        group (`all` last) and module that has work in it.
    """
    tokens_by_module = tokens_of(frame)
    groups, weights = frame["group"].to_numpy(), frame["weight"].to_numpy()
    rows = []
    for group in (*GROUPS, "all"):
        chosen = (groups == group) | (group == "all")
        for module in [LLM, *(m for m in tokens_by_module if m != LLM)]:
            # Of the samples that have work for the module: zeros of all others would hide how uneven these are.
            worked = chosen & (tokens_by_module[module] > 0)
            if worked.any():
                tokens = tokens_by_module[module][worked]
                values = quantiles(tokens, weights[worked], (0.5, 0.9, 0.99))
                rows.append((group, module, len(tokens), *values, int(tokens.max())))
    numbers = ("num_samples", "p50_tokens", "p90_tokens", "p99_tokens", "max_tokens")
    schema = {"group": pl.String, "module": pl.String, **dict.fromkeys(numbers, pl.Int64)}
    return pl.DataFrame(rows, schema, orient="row")


def summary_text(frame: pl.DataFrame) -> str:
    """`summary` as a table of plain characters, with every row."""
    with pl.Config(
        tbl_rows=-1, tbl_cols=-1, tbl_width_chars=120, tbl_formatting="ASCII_MARKDOWN",
        tbl_hide_dataframe_shape=True, tbl_hide_column_data_types=True,
    ):  # fmt: skip
        return str(summary(frame))


def quantiles(values: npt.NDArray[np.int64], weights: Floats, shares: Sequence[float]) -> list[int]:
    """Per share, the smallest value that this share of the weight does not exceed."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    at = np.searchsorted(reached, np.array(shares) - _ROUNDING)
    return [int(v) for v in values[order][np.minimum(at, len(values) - 1)]]


def tokens_of(frame: pl.DataFrame) -> dict[str, npt.NDArray[np.int64]]:
    """Per module, tokens of every sample of a `profile_frame`; encoders sorted, the LLM last."""
    suffix = "_items"
    modules = sorted(n.removesuffix(suffix) for n in frame.columns if n.endswith(suffix))
    modules.sort(key=lambda module: module == LLM)
    return {module: frame[f"{module}_tokens"].to_numpy() for module in modules}


def sample_batches(
    shapes: Sequence[SampleShape], global_batch_size: int, num_batches: int, seed: int
) -> list[tuple[SampleShape, ...]]:
    """Independent global batches for the planner to simulate, each drawn by weight and without replacement.

    A dataset smaller than a batch gives batches of the whole dataset.

    Raises:
        DataError: there are no shapes.
    """
    if not shapes:
        raise DataError("no valid samples to draw batches from", hint="see the quarantine table for the reasons")
    rng = np.random.default_rng(seed)
    size = min(global_batch_size, len(shapes))
    weights = np.array([s.weight for s in shapes])
    shares = None if (weights == weights[0]).all() else weights / weights.sum()
    draws = (rng.choice(len(shapes), size=size, replace=False, p=shares) for _ in range(num_batches))
    return [tuple(shapes[i] for i in draw) for draw in draws]


@dataclass(frozen=True, slots=True)
class Shift:
    """One quantity of two datasets."""

    quantity: str
    """`group`, or `<module>_tokens`."""
    distance: float
    """0: the same distribution; 1: nothing in common."""
    chance: float
    """Distance that two draws from one distribution rarely exceed."""
    mean_ratio: float
    """Mean after over mean before; NaN for groups, and where the mean before is 0."""


@dataclass(frozen=True, slots=True)
class Drift:
    """All quantities of two datasets, the farthest first."""

    shifts: tuple[Shift, ...]

    @property
    def distance(self) -> float:
        """Largest distance."""
        return self.shifts[0].distance

    def beyond(self, threshold: float) -> tuple[Shift, ...]:
        """Quantities that are farther apart than chance and than `threshold`."""
        return tuple(s for s in self.shifts if s.distance > max(threshold, s.chance))


def drift(before: pl.DataFrame, after: pl.DataFrame) -> Drift:
    """Compares two of `profile_frame`.

    Raises:
        DataError: one of them is empty.
    """
    if before.is_empty() or after.is_empty():
        raise DataError("a dataset without valid samples has no distribution to compare")
    tokens = tokens_of(before), tokens_of(after)
    modules = sorted({*tokens[0], *tokens[1]})
    weights = [frame["weight"].to_numpy() for frame in (before, after)]
    sizes = [w.sum() ** 2 / (w**2).sum() for w in weights]  # as many equal samples as say the same
    alpha = ALPHA / (len(modules) + 1)
    ks_chance = math.sqrt(-math.log(alpha / 2) / 2 * (1 / sizes[0] + 1 / sizes[1]))
    shifts = []
    for module in modules:
        # A module that one dataset has no work for takes 0 tokens of each of its samples.
        values = [of.get(module, np.zeros(len(w))).astype(np.float64) for of, w in zip(tokens, weights, strict=True)]
        distance = _kolmogorov_smirnov(values[0], values[1], *weights)
        means = [float(np.average(v, weights=w)) for v, w in zip(values, weights, strict=True)]
        shifts.append(
            Shift(f"{module}_tokens", distance, min(1.0, ks_chance), means[1] / means[0] if means[0] else math.nan)
        )
    shares = [np.array([w[(frame["group"] == g).to_numpy()].sum() for g in GROUPS]) / w.sum()
              for frame, w in zip((before, after), weights, strict=True)]  # fmt: skip
    tv_chance = math.sqrt((len(GROUPS) * math.log(2) - math.log(alpha)) / 2 * (1 / sizes[0] + 1 / sizes[1]))
    shifts.append(Shift("group", float(np.abs(shares[0] - shares[1]).sum() / 2), min(1.0, tv_chance), math.nan))
    return Drift(tuple(sorted(shifts, key=lambda s: -s.distance)))


def _kolmogorov_smirnov(a: Floats, b: Floats, a_weight: Floats, b_weight: Floats) -> float:
    points = np.unique(np.concatenate([a, b]))
    shares = []
    for values, weight in ((a, a_weight), (b, b_weight)):
        order = np.argsort(values, kind="stable")
        cumulative = np.concatenate([[0.0], np.cumsum(weight[order])]) / weight.sum()
        shares.append(cumulative[np.searchsorted(values[order], points, side="right")])
    return float(np.abs(shares[0] - shares[1]).max())
