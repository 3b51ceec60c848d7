"""What has changed since a plan was made: how long modules take for the same work, and what work batches bring.

**Costs.** By how much microbatches take longer than expected is explained by the shares that modules and buckets of
sizes have in them, by least squares with shrinkage per step; the answers, standardised by what noise alone would make
of them, go to CUSUM charts. What all microbatches of a rank have in common says nothing about sizes, and of ranks at
the same stage the lower median counts, so neither a slow rank nor a straggler is a drift.

What was in force when the charts were started is no drift, nor is, after an alarm, the new level.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop.correct.cusum import THRESHOLD, Cusum, Floats
from dflop.correct.times import StepTimes, medians, sums
from dflop.records import Factors, ModuleFactors

DRIFT_COST, DRIFT_SHAPES = "drift_cost", "drift_shapes"
"""Kinds of `Decision`."""
COMMON_SD, OWN_SD = 0.4, 0.3
"""By how much factors may differ from what is expected, all alike and each for itself."""
USUAL_NOISE, LEAST_NOISE, NOISE_RATE = 0.05, 0.01, 0.1
MAD_TO_SD = 1.4826
LEAST_RATIO, LARGEST_RATIO = 0.25, 4.0
"""Of a factor to the one before it."""
MOST_EXCESS = 0.5
"""Of a microbatch over the median of its rank: what strays further may be a straggler and counts as this much."""
LEAST_RESPONSE = 1e-3
"""Of an answer to a shift of one unit: what answers less is not told by the step's microbatches."""
LEAST_SD_FRAC = 0.02
"""Of a batch's seconds: smaller differences between batches count as none."""


@dataclass(frozen=True, slots=True)
class Found:
    """A change, as `Decision` tells it."""

    kind: str
    subject: str
    """Module, or module and sizes of items; `module_of` takes it apart."""
    measured: float
    """Costs: factor on predicted seconds. Shapes: predicted seconds of a global batch, or a bucket's share in them."""
    expected: float
    """The same before."""
    statistic: float
    threshold: float
    detail: str


def subject_of(module: str, bucket: int | None, edges: Sequence[int]) -> str:
    """A module, or the sizes of one of its buckets, for people."""
    if bucket is None:
        return module
    low = edges[bucket - 1] if bucket else 0
    if bucket == len(edges):
        return f"{module} from {low} tokens on"
    return f"{module} of {low} to {edges[bucket] - 1} tokens"


def module_of(subject: str) -> str:
    """The module of a subject."""
    return subject.split(" ", 1)[0]


class CostDrift:
    """Notices that modules, or items of certain sizes, take longer or shorter than what plans reckon with.

    Args:
        edges: Of the buckets, per module.
        shared: Groups of modules that share stages; every module is in one.
        in_force: What plans are made with now.
    """

    def __init__(
        self, edges: Mapping[str, tuple[int, ...]], shared: Sequence[Collection[str]], in_force: Factors | None = None
    ) -> None:
        known = (in_force or Factors()).by_module()
        self._groups = [_CostGroup({m: edges[m] for m in sorted(modules)}, known) for modules in shared]

    def observe(self, times: StepTimes) -> list[Found]:
        """Take in one step; what has changed by now, at most one thing per group of modules.

        Args:
            times: Of a step, with uncorrected expectations, as the estimator gets them. The first step of an attempt
                does not belong here: it is slow in every module.
        """
        found = (group.observe(times) for group in self._groups)
        return [f for f in found if f is not None]


class _CostGroup:
    """Charts of modules that share stages: a level per module, and how much each bucket strays from it."""

    def __init__(self, edges: Mapping[str, tuple[int, ...]], known: Mapping[str, ModuleFactors]) -> None:
        self._edges, self.modules = dict(edges), frozenset(edges)
        self._columns = [(i, bucket) for i, m in enumerate(edges) for bucket in range(len(edges[m]) + 1)]
        self._to_module = np.eye(len(edges))[[i for i, _ in self._columns]]
        logs = [_log_factors(known.get(m), edges[m]) for m in edges]
        self._level = np.array([log.mean() for log in logs])
        self._strays = np.concatenate([log - log.mean() for log in logs])
        self._noise = USUAL_NOISE
        self._levels, self._buckets = Cusum(len(edges)), Cusum(len(self._columns))

    def observe(self, times: StepTimes) -> Found | None:
        factors = np.exp(self._to_module @ self._level + self._strays)
        parts = times.table({m: len(edges) + 1 for m, edges in self._edges.items()}) * factors
        known = (times.measured_s > 0) & parts.any(axis=1)
        if not known.any():
            return None
        parts, times = parts[known], times.rows(known)
        expected_s = parts.sum(axis=1)
        within, common = _split(times.measured_s / expected_s - 1.0, times)
        shares = parts / expected_s[:, None]
        self._levels.observe(*_scores(shares @ self._to_module, within + common, self._noise, COMMON_SD))
        self._buckets.observe(*_scores(_centred(shares, times), within, self._noise, 0.0))
        spread = MAD_TO_SD * float(np.median(np.abs(within)))
        self._noise += NOISE_RATE * (max(spread, LEAST_NOISE) - self._noise)
        return self._alarm()

    def _alarm(self) -> Found | None:
        """A bucket goes before a level: that most seconds are in one bucket moves the level, but not the reverse."""
        if (column := self._buckets.alarm()) is not None:
            i, bucket = self._columns[column]
            return self._changed(self._buckets, column, i, bucket)
        if (module := self._levels.alarm()) is not None:
            return self._changed(self._levels, module, module, None)
        return None

    def _changed(self, charts: Cusum, series: int, i: int, bucket: int | None) -> Found:
        """Takes the new level for granted from now on."""
        module, statistic = list(self._edges)[i], charts.statistic(series)
        shift, num_steps = charts.shift(series)
        ratio = float(np.clip(1.0 + shift, LEAST_RATIO, LARGEST_RATIO))
        expected = float(np.exp(self._level[i] + (0.0 if bucket is None else self._strays[series])))
        (self._level if bucket is None else self._strays)[series] += np.log(ratio)
        self._levels.reset()
        self._buckets.reset()
        subject, measured = subject_of(module, bucket, self._edges[module]), expected * ratio
        detail = (
            f"{subject}: x{measured:.2f} of the predicted seconds, seen over {num_steps} steps; "
            f"plans reckoned with x{expected:.2f}"
        )
        return Found(DRIFT_COST, subject, measured, expected, statistic, THRESHOLD, detail)


def _log_factors(known: ModuleFactors | None, edges: Sequence[int]) -> Floats:
    """`[buckets]`, of factors whose buckets may be others."""
    if known is None:
        return np.zeros(len(edges) + 1)
    first_tokens = np.array([0, *edges])
    logs: Floats = np.log(np.array(known.factors)[np.searchsorted(known.edges, first_tokens, side="right")])
    return logs


def _split(excess: Floats, times: StepTimes) -> tuple[Floats, Floats]:
    """(what strays from the median of its rank, that median of the usual rank at the same stage), both `[rows]`."""
    middle = medians(excess, times.node, len(times.nodes))
    peers: dict[tuple[str, int], list[float]] = {}
    for (module, stage, _), median in zip(times.nodes, middle.tolist(), strict=True):
        if not math.isnan(median):
            peers.setdefault((module, stage), []).append(median)
    usual = {place: sorted(found)[(len(found) - 1) // 2] for place, found in peers.items()}
    common = np.array([usual.get((module, stage), math.nan) for module, stage, _ in times.nodes])
    return np.clip(excess - middle[times.node], -MOST_EXCESS, MOST_EXCESS), common[times.node]


def _centred(shares: Floats, times: StepTimes) -> Floats:
    """Shares less their mean over the microbatches of the same rank."""
    total = sums(shares, times.node, len(times.nodes))
    num = np.maximum(np.bincount(times.node, minlength=len(total)), 1)
    centred: Floats = shares - (total / num[:, None])[times.node]
    return centred


def _scores(shares: Floats, excess: Floats, noise: float, common_sd: float) -> tuple[Floats, Floats]:
    """(least squares answers in standard deviations of noise, what a shift of one unit makes of them), `[series]`."""
    num = shares.shape[1]
    prior = OWN_SD**2 * np.eye(num) + common_sd**2
    answer = np.linalg.solve(shares.T @ shares / noise**2 + np.linalg.inv(prior), shares.T / noise**2)
    sd = noise * np.sqrt((answer**2).sum(axis=1))
    response = np.einsum("sr,rs->s", answer, shares)
    is_told = response > LEAST_RESPONSE
    sd = np.where(is_told, sd, 1.0)
    return np.where(is_told, answer @ excess / sd, np.nan), np.where(is_told, response / sd, 0.0)


@dataclass(frozen=True, slots=True)
class Usual:
    """What global batches of a plan bring to one module."""

    mean_s: float
    """Predicted seconds, all ranks together."""
    sd_s: float
    """From batch to batch."""
    shares: Floats
    """`[buckets]`, of these seconds."""
    share_sds: Floats
    """`[buckets]`, from batch to batch."""


def usual_of(seconds: Floats, shares: Floats) -> Usual:
    """Of some batches.

    Args:
        seconds: `[batches]`.
        shares: `[batches, buckets]`.
    """
    if len(seconds) < 2:
        return Usual(float(seconds.mean()), 0.0, shares.mean(axis=0), np.zeros(shares.shape[1]))
    return Usual(float(seconds.mean()), float(seconds.std(ddof=1)), shares.mean(axis=0), shares.std(axis=0, ddof=1))


class ShapeDrift:
    """Notices that batches bring other work than those that a plan was made for.

    Args:
        edges: Of the buckets, per module.
        usual: Per module, of the batches that the plan was made for.
    """

    def __init__(self, edges: Mapping[str, tuple[int, ...]], usual: Mapping[str, Usual]) -> None:
        self._edges, self._modules = dict(edges), sorted(usual)
        self._columns = [(m, bucket) for m in self._modules for bucket in range(len(usual[m].shares))]
        self._mean_s = np.array([usual[m].mean_s for m in self._modules])
        # Seconds are worth knowing about as a part of the whole batch's.
        self._unit_s = max(float(self._mean_s.sum()), 1e-12)
        self._sd_s = np.maximum([usual[m].sd_s for m in self._modules], LEAST_SD_FRAC * self._unit_s)
        self._share = np.concatenate([usual[m].shares for m in self._modules])
        self._share_sd = np.maximum(np.concatenate([usual[m].share_sds for m in self._modules]), LEAST_SD_FRAC)
        self._seconds, self._shares = Cusum(len(self._modules)), Cusum(len(self._columns))

    def observe(self, seconds: Mapping[str, float], shares: Mapping[str, Floats]) -> list[Found]:
        """Take in one global batch; the clearest change, if there is one by now.

        Args:
            seconds: Predicted, uncorrected, of all ranks together, per module.
            shares: `[buckets]` per module; a module without work may be missing.
        """
        found_s = np.array([seconds.get(m, 0.0) for m in self._modules])
        none = [np.full(sum(name == m for name, _ in self._columns), np.nan) for m in self._modules]
        found = np.concatenate([shares.get(m, n) for m, n in zip(self._modules, none, strict=True)])
        self._seconds.observe((found_s - self._mean_s) / self._sd_s, self._unit_s / self._sd_s)
        self._shares.observe((found - self._share) / self._share_sd, 1.0 / self._share_sd)
        if (series := self._seconds.alarm()) is not None:
            return [self._more(series)]
        if (series := self._shares.alarm()) is not None:
            return [self._other_sizes(series)]
        return []

    def _more(self, series: int) -> Found:
        module, statistic = self._modules[series], self._seconds.statistic(series)
        shift, num_steps = self._seconds.shift(series)
        before = float(self._mean_s[series])
        self._mean_s[series] = after = max(0.0, before + shift * self._unit_s)
        self._reset()
        detail = (
            f"{module}: {after:.4g} predicted seconds per global batch over {num_steps} steps, "
            f"{before:.4g} in the batches that the plan was made for"
        )
        return Found(DRIFT_SHAPES, module, after, before, statistic, THRESHOLD, detail)

    def _other_sizes(self, series: int) -> Found:
        (module, bucket), statistic = self._columns[series], self._shares.statistic(series)
        shift, num_steps = self._shares.shift(series)
        before = float(self._share[series])
        self._share[series] = after = float(np.clip(before + shift, 0.0, 1.0))
        self._reset()
        subject = subject_of(module, bucket, self._edges[module])
        detail = (
            f"{subject}: {after:.1%} of the module's seconds over {num_steps} steps, "
            f"{before:.1%} in the batches that the plan was made for"
        )
        return Found(DRIFT_SHAPES, subject, after, before, statistic, THRESHOLD, detail)

    def _reset(self) -> None:
        self._seconds.reset()
        self._shares.reset()
