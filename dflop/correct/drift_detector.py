"""What has changed since a plan was made: how long modules take for the same work, and what work batches bring.

**Costs**: the estimator's factor of a module, or of a size relative to its module, differs significantly from that
which plans use, in several steps in a row. **Shapes**: the last batches bring other work than the batches of the plan
did, by Student's test of two means.

What is in force at the start is no drift, nor is, after an alarm, what was found.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop.correct.estimate import Belief
from dflop.cost.model import Floats
from dflop.records import Factors, ModuleFactors

DRIFT_COST, DRIFT_SHAPES = "drift_cost", "drift_shapes"
"""Kinds of `Decision`."""
WORTH_KNOWING, NUM_SD, NUM_STEPS = 0.15, 3.0, 4
"""A factor has changed when it differs from the plans' by this ratio and this many standard deviations, for this many
steps in a row."""
SHIFT_WORTH_KNOWING, NUM_SD_SHIFT = 0.13, 5.0
"""The mean of the last batches has moved when it differs by this part of a batch's seconds, or of a module's, and is as
unlikely as so many standard deviations are where these are known."""
NUM_RECENT, NUM_LATER = 9, 5
"""Batches that are compared with those of the plan, and the last ones of them, which tell what is new: the others may
be from before the change."""


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
    """Notices that modules, or items of certain sizes, take longer or shorter than what plans expect.

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
    num_batches: int
    """Number of batches this estimate comes from."""


def usual_of(seconds: Floats, shares: Floats) -> Usual:
    """The usual times of some batches.

    Args:
        seconds: `[batches]`.
        shares: `[batches, buckets]`.
    """
    sd_s, share_sds = (of.std(axis=0, ddof=1) if len(of) > 1 else np.zeros(of.shape[1:]) for of in (seconds, shares))
    return Usual(float(seconds.mean()), float(sd_s), shares.mean(axis=0), share_sds, len(seconds))


class ShapeDrift:
    """Notices that batches bring other work than those that a plan was made for.

    Args:
        edges: Of the buckets, per module.
        usual: Per module, of the batches that the plan was made for.
    """

    def __init__(self, edges: Mapping[str, tuple[int, ...]], usual: Mapping[str, Usual]) -> None:
        self._edges, self._modules = dict(edges), sorted(usual)
        known = [usual[m] for m in self._modules]
        self._places = [
            (m, bucket) for m, of in zip(self._modules, known, strict=True) for bucket in range(len(of.shares))
        ]
        # Seconds are worth knowing about as a part of the whole batch's.
        self._unit_s = max(sum(of.mean_s for of in known), 1e-12)
        self._mean = np.concatenate([[of.mean_s / self._unit_s for of in known], *(of.shares for of in known)])
        self._sd = np.concatenate([[of.sd_s / self._unit_s for of in known], *(of.share_sds for of in known)])
        modules = (*self._modules, *(m for m, _ in self._places))
        self._num = np.array([float(usual[m].num_batches) for m in modules])
        self._recent: deque[Floats] = deque(maxlen=NUM_RECENT)

    def observe(self, seconds: Mapping[str, float], shares: Mapping[str, Floats]) -> list[Found]:
        """Take in one global batch; the clearest change, if there is one by now.

        Args:
            seconds: Predicted, uncorrected, of all ranks together, per module.
            shares: `[buckets]` per module; a module without work may be missing, and says nothing.
        """
        found = [seconds.get(m, 0.0) / self._unit_s for m in self._modules]
        found += [float(shares[m][bucket]) if m in shares else math.nan for m, bucket in self._places]
        self._recent.append(np.where(np.isfinite(found), found, self._mean))
        if len(self._recent) < NUM_RECENT:
            return []
        recent = np.array(self._recent)
        later = recent[-NUM_LATER:]
        shift = np.abs(later.mean(axis=0) - self._mean)
        shift[np.abs(recent.mean(axis=0) - self._mean) <= self._limit(recent)] = 0
        if shift.max(initial=0) <= SHIFT_WORTH_KNOWING:
            return []
        # More work for a module moves shares, too: seconds go first.
        of_seconds = shift[: len(self._modules)]
        series = int(np.argmax(of_seconds if of_seconds.max() > SHIFT_WORTH_KNOWING else shift))
        before = float(self._mean[series])
        # What was found is taken for granted from now on.
        self._mean[series] = after = float(later[:, series].mean())
        self._sd[series], self._num[series] = later[:, series].std(ddof=1), NUM_LATER
        self._recent.clear()
        return [self._told(series, after, before)]

    def _limit(self, recent: Floats) -> Floats:
        """`[series]`: how far the mean of the last batches may be from the plan's by chance.

        The variance is of both: those few that the plan was made for may be alike by chance.
        """
        degrees = self._num + NUM_RECENT - 2
        squares = (self._num - 1) * self._sd**2 + (NUM_RECENT - 1) * recent.var(axis=0, ddof=1)
        deviation: Floats = np.sqrt(squares / degrees * (1 / self._num + 1 / NUM_RECENT))
        return student_quantile(degrees) * deviation

    def _told(self, series: int, after: float, before: float) -> Found:
        if series < len(self._modules):
            subject, what = self._modules[series], "predicted seconds per global batch"
            after, before = after * self._unit_s, before * self._unit_s
            figures = f"{after:.4g}", f"{before:.4g}"
        else:
            module, bucket = self._places[series - len(self._modules)]
            subject, what = subject_of(module, bucket, self._edges[module]), "of the module's seconds"
            figures = f"{after:.1%}", f"{before:.1%}"
        detail = f"{subject}: {figures[0]} {what} in the last {NUM_LATER} batches, {figures[1]} in those of the plan"
        return Found(DRIFT_SHAPES, subject, after, before, detail)


def student_quantile(degrees: Floats) -> Floats:
    """What `NUM_SD_SHIFT` is where the deviation is estimated with so many degrees of freedom (Wallace, 1959)."""
    normal = NUM_SD_SHIFT * (8 * degrees + 3) / (8 * degrees + 1)
    found: Floats = np.sqrt(degrees * np.expm1(normal**2 / degrees))
    return found
