"""What has changed since a plan was made: how long modules take for the same work, and what work batches bring.

**Costs.** A change is what the estimator believes, where that strays surely, and for some steps, from what was in force
when the run began or from the change told before. So neither a slow rank nor a straggler nor noise is one.

**Work.** Cumulative sums, per module of the seconds that batches bring and per size of its share in them: each adds
what lies beyond what is chance. What a batch adds is bounded, so that no single one, however wild, is an alarm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop.correct.estimate import Belief
from dflop.cost.model import Floats
from dflop.records import Factors

DRIFT_COST, DRIFT_SHAPES = "drift_cost", "drift_shapes"
"""Kinds of `Decision`."""
COST_FRAC, COST_SD, COST_STEPS = 0.15, 4.0, 6
"""A factor has changed when it was beyond both for so many steps in a row; by then it is known how far."""
SLACK_SD, THRESHOLD_SD, MOST_SD = 0.75, 10.0, 2.5
"""Of batches: what counts as chance, which sum is an alarm, and the most that one batch adds: an alarm takes five."""
WORTH_KNOWING = 0.2
"""A shift, as a part of a batch's seconds, that is worth an alarm; half of it counts as chance, however alike batches
are."""
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
        in_force: What plans are made with now, with the buckets of every module.
    """

    def __init__(self, in_force: Factors) -> None:
        self._edges = {found.module: found.edges for found in in_force.modules}
        self._known = {found.module: _level_and_strays(found.level, found.factors) for found in in_force.modules}
        self._num_steps = {module: np.zeros(len(known), dtype=np.int64) for module, known in self._known.items()}

    def observe(self, beliefs: Mapping[str, Belief]) -> list[Found]:
        """What has changed by now, at most one thing per module.

        Args:
            beliefs: Of the estimator, once it has learnt from a step; with the same buckets.
        """
        return [found for module in self._known if (found := self._changed(module, beliefs[module])) is not None]

    def _changed(self, module: str, belief: Belief) -> Found | None:
        """A size goes before the level: what is slow in one size moves the level, but not the reverse."""
        now, known = _level_and_strays(belief.level, belief.factors), self._known[module]
        sd = np.array([belief.level_sd, *belief.sd]) / [belief.level, *belief.factors]
        excess = np.abs(now - known) - np.maximum(np.log1p(COST_FRAC), COST_SD * sd)
        num_steps = self._num_steps[module] = np.where(excess > 0, self._num_steps[module] + 1, 0)
        is_sure = num_steps >= COST_STEPS
        if not is_sure.any():
            return None
        strays = np.where(is_sure, excess, -np.inf)[1:]
        bucket = int(strays.argmax()) if is_sure[1:].any() else None
        of = [0] if bucket is None else [0, 1 + bucket]
        measured, expected = float(np.exp(now[of].sum())), float(np.exp(known[of].sum()))
        self._known[module], self._num_steps[module] = now, np.zeros_like(num_steps)
        subject = subject_of(module, bucket, self._edges[module])
        detail = (
            f"{subject}: x{measured:.2f} of the predicted seconds, seen over {num_steps[of[-1]]} steps; "
            f"plans reckoned with x{expected:.2f}"
        )
        return Found(DRIFT_COST, subject, measured, expected, detail)


def _level_and_strays(level: float, factors: Sequence[float]) -> Floats:
    """`[1 + buckets]` logarithms: of the level, and of each bucket's factor to it."""
    return np.log([level, *(factor / level for factor in factors)])


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
        self._edges, modules = dict(edges), sorted(usual)
        self._num_buckets = {m: len(usual[m].shares) for m in modules}
        self._series = [(m, b) for m in modules for b in (None, *range(self._num_buckets[m]))]
        """Seconds of each module, as a part of a usual batch's, and after them the shares of its buckets."""
        self._batch_s = max(sum(found.mean_s for found in usual.values()), 1e-12)
        self._mean = np.concatenate([[usual[m].mean_s / self._batch_s, *usual[m].shares] for m in modules])
        sds = np.concatenate([[usual[m].sd_s / self._batch_s, *usual[m].share_sds] for m in modules])
        self._sd = np.maximum(sds, LEAST_SD_FRAC)
        self._sums = np.zeros((2, len(self._mean)))  # of rises, of falls
        self._since: list[list[float]] = [[] for _ in self._series]
        """Values since a sum was last 0."""

    def observe(self, seconds: Mapping[str, float], shares: Mapping[str, Floats]) -> list[Found]:
        """Take in one global batch; the clearest change, if there is one by now.

        Args:
            seconds: Predicted, uncorrected, of all ranks together, per module.
            shares: `[buckets]` per module; a module without work may be missing.
        """
        found = np.concatenate(
            [
                [seconds.get(m, 0.0) / self._batch_s, *shares.get(m, np.full(num, np.nan))]
                for m, num in self._num_buckets.items()
            ]
        )
        scores = np.nan_to_num((found - self._mean) / self._sd)
        slack = np.maximum(SLACK_SD, WORTH_KNOWING / 2 / self._sd)
        added = np.minimum(np.stack([scores, -scores]) - slack, MOST_SD)
        self._sums = np.where(np.isnan(found), self._sums, np.maximum(0.0, self._sums + added))
        height = self._sums.max(axis=0)
        for i in np.flatnonzero(~np.isnan(found)).tolist():
            self._since[i] = [*self._since[i], float(found[i])] if height[i] > 0 else []
        # More work of a module goes before other sizes of it.
        alarms = [
            (bucket is None, height[i], i) for i, (_, bucket) in enumerate(self._series) if height[i] > THRESHOLD_SD
        ]
        return [self._told(max(alarms)[2])] if alarms else []

    def _told(self, i: int) -> Found:
        """Takes what is new for granted from now on; a median, for single batches may be wild."""
        (module, bucket), num_steps, before = self._series[i], len(self._since[i]), float(self._mean[i])
        self._mean[i] = after = float(np.median(self._since[i]))
        self._sums[:] = 0.0
        self._since = [[] for _ in self._series]
        subject = subject_of(module, bucket, self._edges[module])
        if bucket is None:
            before, after = before * self._batch_s, after * self._batch_s
            detail = f"{module}: {after:.4g} predicted seconds per global batch over {num_steps} steps, {before:.4g}"
        else:
            detail = f"{subject}: {after:.1%} of the module's seconds over {num_steps} steps, {before:.1%}"
        detail += " in the batches that the plan was made for"
        return Found(DRIFT_SHAPES, subject, after, before, detail)
