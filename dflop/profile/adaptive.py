"""Which group to probe next: the one after which the data's own microbatches are predicted best at full depth.

Seconds are linear in the terms of the cost model (a fixed term, tokens, squared tokens per layer; a fixed term, tokens,
items at the edge) and in bends of the layer's token curve at a few knots. A Bayesian regression on relative errors
keeps the covariance of their coefficients. Another group would lower the variance of every prediction by a closed
formula (the low-rank update of an inverse), so all candidates are judged at once by the average over microbatches drawn
from the data: one-step look-ahead for I-optimality (Chaloner and Verdinelli, Statistical Science 10(3), 1995).

A group is timed at every depth. What makes its shape faster or slower than the curve says does so at all depths alike
and cancels where layers are told from the edge; timing noise does not. Both are estimated, apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dflop.records import ModuleLoad

Floats = npt.NDArray[np.float64]

NUM_TERMS = 6
NUM_KNOTS = 4
TERM_PRIOR_FRAC = 2.0
"""Standard deviation, before any probe, of what one term adds to a microbatch, relative to all its seconds."""
BEND_PRIOR_FRAC = 0.05
"""The same for one bend: curves are nearly straight."""
SHAPE_FRAC = 0.03
"""By how much shapes are believed to stray from the curve before any residual was seen; worth `PRIOR_GROUPS` groups."""
PRIOR_GROUPS = 4.0
MIN_NOISE_FRAC = 0.003


class Design:
    """Groups probed and to be probed of one module, run in one way. Same calls, same seconds: same choices.

    Args:
        depths: Layers of the probes of every group.
        candidates: Per group its load at each of `depths`; windows of attention may differ between them.
        num_layers: Depth of the module in the full model.
        targets: Loads of microbatches as training will make them; each counts the same.
    """

    def __init__(
        self,
        depths: Sequence[int],
        candidates: Sequence[Sequence[ModuleLoad]],
        num_layers: int,
        targets: Sequence[ModuleLoad],
    ) -> None:
        raw = np.stack([_raw(n, [loads[i] for loads in candidates]) for i, n in enumerate(depths)], axis=1)
        wanted = _raw(num_layers, targets)
        self.num_tokens: Floats = raw[:, :, 2].max(axis=1)
        knots = np.geomspace(max(self.num_tokens.min(), 1.0), max(self.num_tokens.max(), 2.0), NUM_KNOTS + 2)[1:-1]
        self._rows, self._targets = _features(raw, knots), _features(wanted, knots)
        # Before anything is known: proportional to layers and tokens, the edge like one layer more.
        self._guess, self._target_guess = ((1 + x[..., 0]) * np.maximum(x[..., 2], 1.0) for x in (raw, wanted))
        self._prior = np.full(self._rows.shape[-1], TERM_PRIOR_FRAC)
        self._prior[NUM_TERMS:] = BEND_PRIOR_FRAC
        self._available = np.ones(len(raw), dtype=bool)
        self._taken: list[int] = []
        self._seconds: list[Sequence[float]] = []
        self._noises: list[float] = []
        self._shape_sq, self._noise_sq = SHAPE_FRAC**2, MIN_NOISE_FRAC**2
        self._relate()
        self._learn()

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    @property
    def uncertainty_frac(self) -> float:
        """Standard deviation of the curve's seconds at the targets, relative, root mean square over them."""
        z = self._target_z
        return float(np.sqrt(np.mean(np.einsum("ti,ij,tj->t", z, self._covariance, z))))

    def seconds_of(self, index: int) -> float:
        """Predicted seconds of one run of a group at all depths; 0 before anything was timed."""
        return float(self._predicted[index].sum()) if self._taken else 0.0

    def next(self, limit_s: float = math.inf) -> int | None:
        """Index of the most useful group that is left, None when there is none; first the smallest and the largest.

        Args:
            limit_s: What a run of it at all depths may take, by what is known; groups beyond it are passed over.
        """
        left = self._affordable(limit_s)
        if not len(left):
            return None
        if len(self._taken) < 2:
            tokens = self.num_tokens[left]
            return int(left[tokens.argmax() if self._taken else tokens.argmin()])
        shared = self._rows_z[left] @ self._covariance
        own = shared @ self._rows_z[left].transpose(0, 2, 1) + self._errors()
        with_targets = shared @ self._target_z.T
        gain = np.einsum("gdt,gdt->g", with_targets, np.linalg.solve(own, with_targets))
        return int(left[gain.argmax()])

    def first(self, limit_s: float = math.inf) -> int | None:
        """Index of the first group that is left, whatever it is good for; `limit_s` as in `next`."""
        left = self._affordable(limit_s)
        return int(left[0]) if len(left) else None

    def cheapest(self) -> int | None:
        """Index of the group that is left and predicted to take least, of a size that was not timed if there is one.

        Many of the smallest groups may be equally large, and a fit cannot tell its terms apart by one size.
        """
        left = np.flatnonzero(self._available)
        new = left[~np.isin(self.num_tokens[left], self.num_tokens[self._taken])]
        left = new if len(new) else left
        return int(left[self._predicted[left].sum(axis=1).argmin()]) if len(left) else None

    def largest_first(self) -> Iterator[int]:
        """Groups that are left, the largest first; what is dropped meanwhile is skipped."""
        for index in np.argsort(-self.num_tokens, kind="stable"):
            if self._available[index]:
                yield int(index)

    def take(self, index: int, seconds: Sequence[float], noise_frac: float) -> None:
        """Note what a group took.

        Args:
            index: Which group.
            seconds: Forward and backward together, at each depth.
            noise_frac: Relative standard error of these.
        """
        self._available[index] = False
        self._taken.append(index)
        self._seconds.append(seconds)
        self._noises.append(noise_frac)
        self._noise_sq = max(float(np.median(self._noises)), MIN_NOISE_FRAC) ** 2
        for _ in range(2):  # predictions and the weights that follow from them
            self._relate()
            self._learn()

    def drop(self, num_tokens: float) -> None:
        """Leave out groups of that many tokens or more: they do not fit into memory."""
        self._available &= self.num_tokens < num_tokens

    def _affordable(self, limit_s: float) -> npt.NDArray[np.intp]:
        left = np.flatnonzero(self._available)
        return left[self._predicted[left].sum(axis=1) <= limit_s] if self._taken else left

    def _relate(self) -> None:
        """Make rows relative to their predicted seconds, and columns to what they amount to in the targets."""
        rows, targets = self._guess, self._target_guess
        if self._taken:
            # A guess scaled to the probes bounds predictions where few probes say anything.
            unit = float(np.median(np.array(self._seconds) / self._guess[self._taken]))
            rows, targets = rows * unit, targets * unit
            if len(self._taken) > 1:
                rows = np.maximum(self._rows @ self._coefficients, 0.1 * rows)
                targets = np.maximum(self._targets @ self._coefficients, 0.1 * targets)
        self._predicted = rows
        self._target_z = self._targets / targets[:, None]
        self._scale = np.sqrt(np.mean(self._target_z**2, axis=0))
        self._scale[self._scale == 0] = 1.0
        self._target_z = self._target_z / self._scale
        self._rows_z = self._rows / rows[..., None] / self._scale

    def _learn(self) -> None:
        """Coefficients, their covariance, and by how much shapes stray from the curve."""
        rows, precision = self._rows_z[self._taken], np.diag(self._prior**-2)
        weighted = np.linalg.solve(self._errors(), rows) if self._taken else rows
        self._covariance: Floats = np.linalg.inv(precision + np.einsum("gdi,gdj->ij", weighted, rows))
        if not self._taken:
            return
        relative = np.array(self._seconds) / self._predicted[self._taken]
        mean = self._covariance @ np.einsum("gdi,gd->i", weighted, relative)
        self._coefficients: Floats = mean / self._scale
        residual = (relative - rows @ mean).mean(axis=1)
        # Trace of the hat matrix: how many numbers the coefficients used up, shared by the depths.
        spent = float(np.einsum("gdi,ij,gdj->", weighted, self._covariance, rows)) / rows.shape[1]
        num_free = max(len(self._taken) - spent, 0.0)
        self._shape_sq = (PRIOR_GROUPS * SHAPE_FRAC**2 + float(residual @ residual)) / (PRIOR_GROUPS + num_free)

    def _errors(self) -> Floats:
        """Covariance of one group's relative errors over the depths."""
        num_depths = self._rows.shape[1]
        errors: Floats = self._shape_sq * np.ones((num_depths, num_depths)) + self._noise_sq * np.eye(num_depths)
        return errors


def _raw(num_layers: int, loads: Sequence[ModuleLoad]) -> Floats:
    """`[n, 4]`: layers, items, tokens, squared tokens."""
    return np.array([(num_layers, x.num_items, x.num_tokens, x.sum_sq_tokens) for x in loads], dtype=np.float64)


def _features(raw: Floats, knots: Floats) -> Floats:
    """Design rows `[..., NUM_TERMS + knots]` of `[..., 4]`."""
    layers, items, tokens, squares = np.moveaxis(raw, -1, 0)
    bends = layers[..., None] * np.minimum(tokens[..., None], knots)
    terms = np.stack([layers, layers * tokens, layers * squares, np.ones_like(tokens), tokens, items], axis=-1)
    return np.concatenate([terms, bends], axis=-1)
