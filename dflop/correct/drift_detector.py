"""What has changed since a plan was made: how long modules take for the same work, and what work batches bring.

**Costs**: the estimator's factor of a module, or of a size relative to its module, differs significantly from that
which plans use, in several steps in a row. **Shapes**: CUSUM charts of what batches bring.

What is in force at the start is no drift, nor is, after an alarm, what was found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop.correct.cusum import Cusum, Floats
from dflop.correct.estimate import Belief
from dflop.records import Factors, ModuleFactors

DRIFT_COST, DRIFT_SHAPES = "drift_cost", "drift_shapes"
"""Kinds of `Decision`."""
WORTH_KNOWING, NUM_SD, NUM_STEPS = 0.15, 3.0, 4
"""A factor has changed when it differs from the plans' by this ratio and this many standard deviations, for this many
steps in a row."""
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
        in_force: What plans are made with now.
    """

    def __init__(self, edges: Mapping[str, tuple[int, ...]], in_force: Factors | None = None) -> None:
        known = (in_force or Factors()).by_module()
        self._edges = dict(edges)
        factors = {m: _factors(known.get(m), own) for m, own in edges.items()}
        self._expected = {m: (float(of.mean()), of) for m, of in factors.items()}
        self._streaks = {m: np.zeros(len(of) + 1) for m, of in factors.items()}
        """Per bucket, and last of the level: steps in a row in which it was far, negative where it was shorter."""

    def observe(self, beliefs: Mapping[str, Belief]) -> list[Found]:
        """What has changed by now, at most one thing per module, from what is known after a step."""
        found = (self._changed(module, belief) for module, belief in beliefs.items())
        return [f for f in found if f is not None]

    def _changed(self, module: str, belief: Belief) -> Found | None:
        """Takes what it finds for granted from now on.

        A bucket goes before the level: that most seconds are in one bucket moves the level, but not the reverse.
        """
        (level, factors), measured = self._expected[module], np.array(belief.factors)
        away = np.log(np.append(measured / belief.level / (factors / level), belief.level / level))
        sd = np.append(np.array(belief.sd) / measured, belief.level_sd / belief.level)
        far = np.sign(away) * (np.abs(away) > np.maximum(math.log1p(WORTH_KNOWING), NUM_SD * sd))
        streaks = self._streaks[module]
        streaks[:] = np.where(far * streaks < 0, far, (streaks + far) * (far != 0))
        is_sure = np.abs(streaks) >= NUM_STEPS
        if not is_sure.any():
            return None
        bucket = int(np.argmax(np.abs(away[:-1]) * is_sure[:-1])) if is_sure[:-1].any() else None
        now, before = (belief.level, level) if bucket is None else (float(measured[bucket]), float(factors[bucket]))
        self._expected[module] = belief.level, measured
        streaks[:] = 0
        subject = subject_of(module, bucket, self._edges[module])
        detail = f"{subject}: x{now:.2f} measured / predicted; plans were made with x{before:.2f}"
        return Found(DRIFT_COST, subject, now, before, detail)


def _factors(known: ModuleFactors | None, edges: Sequence[int]) -> Floats:
    """`[buckets]`, of factors whose buckets may be others."""
    if known is None:
        return np.ones(len(edges) + 1)
    first_tokens = np.array([0, *edges])
    return np.array(known.factors)[np.searchsorted(known.edges, first_tokens, side="right")]


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
        module = self._modules[series]
        shift, num_steps = self._seconds.shift(series)
        before = float(self._mean_s[series])
        self._mean_s[series] = after = max(0.0, before + shift * self._unit_s)
        self._reset()
        detail = (
            f"{module}: {after:.4g} predicted seconds per global batch over {num_steps} steps, "
            f"{before:.4g} in the batches of the plan"
        )
        return Found(DRIFT_SHAPES, module, after, before, detail)

    def _other_sizes(self, series: int) -> Found:
        module, bucket = self._columns[series]
        shift, num_steps = self._shares.shift(series)
        before = float(self._share[series])
        self._share[series] = after = float(np.clip(before + shift, 0.0, 1.0))
        self._reset()
        subject = subject_of(module, bucket, self._edges[module])
        detail = (
            f"{subject}: {after:.1%} of the module's seconds over {num_steps} steps, "
            f"{before:.1%} in the batches of the plan"
        )
        return Found(DRIFT_SHAPES, subject, after, before, detail)

    def _reset(self) -> None:
        self._seconds.reset()
        self._shares.reset()
