"""Measurements of one module as arrays, and what they say beside the curves: range, noise, parameters, optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from dflop.cost.curve import Bools, Floats, Load
from dflop.cost.identity import bytes_per_value
from dflop.cost.regression import folds
from dflop.records import Measurement

OOM = "oom"


@dataclass(frozen=True, slots=True)
class Probes:
    """Timed probes, each array `[N]`."""

    num_layers: Floats
    num_items: Floats
    num_tokens: Floats
    sum_sq_tokens: Floats
    forward_s: Floats
    backward_s: Floats
    activation_bytes: Floats

    @classmethod
    def of(cls, measurements: Sequence[Measurement]) -> Probes:
        """The probes that fit in memory, in the order given."""
        timed = [m for m in measurements if m.status != OOM]
        columns = {name: np.array([getattr(m, name) for m in timed], dtype=np.float64) for name in _names()}
        return cls(**columns)

    def __len__(self) -> int:
        return len(self.num_tokens)

    def __getitem__(self, mask: Bools) -> Probes:
        picked: dict[str, Any] = {name: getattr(self, name)[mask] for name in _names()}
        return Probes(**picked)

    @property
    def load(self) -> Load:
        return self.num_items, self.num_tokens, self.sum_sq_tokens

    @property
    def seconds(self) -> Floats:
        """Forward + backward."""
        total: Floats = self.forward_s + self.backward_s
        return total

    def folds(self) -> list[Bools]:
        """Masks of what to leave out in turn; the depths of one group of samples stay together."""
        keys = list(zip(self.num_items.tolist(), self.num_tokens.tolist(), strict=True))
        return folds(keys, self.num_tokens)


def _names() -> list[str]:
    return [f.name for f in fields(Probes)]


def probed_range(measurements: Sequence[Measurement]) -> tuple[int, int, float]:
    """(min_tokens, max_tokens, max_mean_length) of what was timed, cut where something did not fit.

    A group that ran out of memory ends the range of tokens at its own, unless as many tokens fitted at its depth in
    another group: then its long sequences were at fault, and it ends the range of mean lengths.
    """
    timed = [m for m in measurements if m.status != OOM]
    sizes = [m.num_tokens for m in timed]
    high, length = max(sizes), max(m.sum_sq_tokens / m.num_tokens for m in timed)
    for m in measurements:
        if m.status == OOM and m.num_tokens > 0:
            if any(other.num_layers >= m.num_layers and other.num_tokens >= m.num_tokens for other in timed):
                length = min(length, m.sum_sq_tokens / m.num_tokens)
            else:
                high = min(high, m.num_tokens)
    return min(sizes), high, length


def noise_frac(measurements: Sequence[Measurement]) -> float:
    """Median over probes of the spread over repeats, relative to the time."""
    spreads = [
        (m.forward_spread_s + m.backward_spread_s) / (m.forward_s + m.backward_s)
        for m in measurements
        if m.status != OOM
    ]
    return float(np.median(spreads))


def param_bytes(measurements: Sequence[Measurement]) -> tuple[int, int]:
    """Exact (layer, edge) parameter bytes: parameters are linear in depth."""
    by_depth = {m.num_layers: m.param_bytes for m in measurements}
    low, high = min(by_depth), max(by_depth)
    layer = (by_depth[high] - by_depth[low]) // (high - low)
    return layer, by_depth[low] - layer * low


def optimizer_s_per_param(measurements: Sequence[Measurement]) -> float:
    """Median over the deepest probes with an optimizer step, where its fixed part weighs least; 0.0 without any."""
    timed = [m for m in measurements if m.optimizer_s > 0 and m.param_bytes > 0]
    if not timed:
        return 0.0
    deepest = max(m.num_layers for m in timed)
    return float(
        np.median([m.optimizer_s * bytes_per_value(m.dtype) / m.param_bytes for m in timed if m.num_layers == deepest])
    )
