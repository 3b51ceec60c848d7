"""Factors of sizes from stage times: a Kalman filter that stragglers do not move and sudden changes do.

A microbatch's seconds are a sum over buckets of sizes, `y = H r + noise`, with `H` the predicted seconds and `r` the
factors. A step may bring hundreds of microbatches for a few dozen factors, so measurements are taken in as
information: `P^-1 + H' R^-1 H`. Noise is of two kinds, a microbatch's own and what all of a rank share in a step
(`noise.py`): `R = diag(v) + c l l'` per rank, with `l` the predicted seconds, inverted by Woodbury's formula. Robust
in three ways: residuals weigh less the larger they are (Huber), the test for a sudden change counts no microbatch for
more than 3 standard deviations, and noise is the median of what is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflop.correct.times import Ints, sums
from dflop.cost.model import Floats

MIN_FACTOR, MAX_FACTOR = 0.25, 4.0
SD_BUCKET, SD_LEVEL = 0.3, 0.4
"""Prior uncertainty of a factor: each bucket's own, and the part that all buckets of a module have in common."""
DRIFT_BUCKET, DRIFT_LEVEL = 0.01, 0.005
"""How far they move per step."""
START_NOISE_FRAC, MIN_NOISE_FRAC, MAX_NOISE_FRAC = 0.1, 0.003, 0.3
"""Standard deviation of a microbatch's relative error."""
NOISE_SMOOTHING = 0.05
HUBER = 2.0
"""Standard deviations beyond which a residual counts less."""
MAX_SURPRISE = 3.0
"""Standard deviations that one microbatch counts for at most when a sudden change is looked for."""
REOPENED = 0.5
"""Part of the first uncertainty that a sudden change brings back."""
REOPEN_EVIDENCE = 3.0
"""Logarithm of how much likelier a step must be after a sudden change than without one."""
MAD_TO_SD = 1.4826
"""Standard deviation of normal errors, in medians of their absolute values."""
NUM_ROUNDS = 3
"""Rounds of weighting and solving."""
MIN_LOAD_FRAC = 0.2
"""Share of the mean microbatch: smaller ones are not expected to be more precise in seconds than this."""


class FactorFilter:
    """Belief about factors that are learnt together: mean and covariance.

    Args:
        mean: `[K]`, before the first step.
        cov: `[K, K]`, before the first step.
        prior_cov: `[K, K]` of who knows nothing; no variance ever exceeds it.
        drift_cov: `[K, K]`, added per step.
    """

    def __init__(self, mean: Floats, cov: Floats, prior_cov: Floats, drift_cov: Floats) -> None:
        self.mean, self.cov = mean.copy(), cov.copy()
        self._prior_cov, self._drift_cov = prior_cov, drift_cov
        self._noise_var = START_NOISE_FRAC**2
        self._num_updates = 0

    def update(self, expected_s: Floats, measured_s: Floats, rank: Ints, shared_var: float) -> None:
        """Take in one step.

        Args:
            expected_s: `[n, K]`, uncorrected, per microbatch and factor; every row has a positive sum.
            measured_s: `[n]`, positive.
            rank: `[n]`, from 0, whose microbatch it was.
            shared_var: Of the relative error that all microbatches of a rank have in common in a step.
        """
        self.cov = limited(self.cov + self._drift_cov, self._prior_cov)
        predicted_s = expected_s @ self.mean
        load_s = np.maximum(predicted_s, MIN_LOAD_FRAC * predicted_s.mean())
        step = Step(expected_s, measured_s, load_s, rank, int(rank.max()) + 1, shared_var)
        own_var, opened = self._noise_var, limited(self.cov + REOPENED * self._prior_cov, self._prior_cov)
        if _evidence(step, own_var, self.mean, self.cov, opened) > REOPEN_EVIDENCE:
            # Factors that have changed, or only more noise than so far? What free factors leave unexplained is noise.
            free = fitted(step, own_var, self.mean, self._prior_cov)
            own_var = max(free.own_var(step), own_var)
            if _evidence(step, own_var, self.mean, self.cov, opened) > REOPEN_EVIDENCE:
                self.cov = opened
        found = fitted(step, own_var, self.mean, self.cov)
        self.mean, self.cov = np.clip(found.mean, MIN_FACTOR, MAX_FACTOR), found.cov
        self._num_updates += 1
        rate = max(1.0 / (self._num_updates + 1), NOISE_SMOOTHING)
        self._noise_var += rate * (found.own_var(step) - self._noise_var)

    def state(self) -> dict[str, Any]:
        """Everything that was learnt, for JSON."""
        return {
            "mean": self.mean.tolist(),
            "cov": self.cov.tolist(),
            "noise_var": self._noise_var,
            "num_updates": self._num_updates,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.mean, self.cov = np.array(state["mean"], dtype=np.float64), np.array(state["cov"], dtype=np.float64)
        self._noise_var, self._num_updates = float(state["noise_var"]), int(state["num_updates"])


@dataclass(frozen=True, slots=True)
class Step:
    """Measurements of one step."""

    expected_s: Floats
    """`[n, K]`."""
    measured_s: Floats
    """`[n]`."""
    load_s: Floats
    """`[n]`, what relative errors are relative to."""
    rank: Ints
    """`[n]`, whose microbatch it is."""
    num_ranks: int
    shared_var: float

    def pull(self, weight: Floats) -> Floats:
        """`[K, n]`, `H' R^-1` where own errors have variance 1 / `weight` and each rank's share an error."""
        weighted = self.expected_s.T * weight
        if self.shared_var <= 0:
            return weighted
        pulled = sums(weighted.T * self.load_s[:, None], self.rank, self.num_ranks).T * self._shrinkage(weight)
        return weighted - pulled[:, self.rank] * (self.load_s * weight)

    def shared_s(self, residual_s: Floats, weight: Floats) -> Floats:
        """`[n]`, what of the residuals each rank's microbatches have in common, as far as they are sure of it."""
        pulled = np.bincount(self.rank, self.load_s * (weight * residual_s), self.num_ranks)
        of_rank: Floats = self._shrinkage(weight) * pulled
        return self.load_s * of_rank[self.rank]

    def _shrinkage(self, weight: Floats) -> Floats:
        """`[ranks]`, variance of a rank's shared error once its microbatches are known."""
        if self.shared_var <= 0:
            return np.zeros(self.num_ranks)
        seen: Floats = np.bincount(self.rank, weight * self.load_s**2, self.num_ranks).astype(np.float64)
        return 1.0 / (1.0 / self.shared_var + seen)


@dataclass(frozen=True, slots=True)
class Fit:
    """Factors after a step."""

    mean: Floats
    cov: Floats
    weight: Floats
    """`[n]`, of each microbatch, one over its variance; stragglers weigh less."""
    residual_s: Floats
    """`[n]`, less what a rank's microbatches have in common."""

    def own_var(self, step: Step) -> float:
        """Squared relative error of a typical microbatch, from what this fit, that it took part in, left of it."""
        leverage = float((_quadratic(step.expected_s, self.cov) * self.weight).mean())
        if step.shared_var > 0:
            leverage += step.num_ranks / len(step.load_s)
        typical = MAD_TO_SD * float(np.median(np.abs(self.residual_s / step.load_s)))
        return min(max(typical**2 / max(1.0 - leverage, 0.25), MIN_NOISE_FRAC**2), MAX_NOISE_FRAC**2)


def fitted(step: Step, own_var: float, mean: Floats, cov: Floats) -> Fit:
    """Factors after the measurements of a step, of which stragglers weigh less."""
    information, variance = _inverse(cov), own_var * step.load_s**2
    residual_s = step.measured_s - step.expected_s @ mean
    spread_s = np.sqrt(_quadratic(step.expected_s, cov) + variance + step.shared_var * step.load_s**2)
    for _ in range(NUM_ROUNDS):
        size = np.minimum(1.0, HUBER * spread_s / np.maximum(np.abs(residual_s), 1e-300))
        weight: Floats = size / variance
        pull = step.pull(weight)
        after_cov = _inverse(information + pull @ step.expected_s)
        after = mean + after_cov @ (pull @ (step.measured_s - step.expected_s @ mean))
        residual_s = step.measured_s - step.expected_s @ after
        residual_s = residual_s - step.shared_s(residual_s, weight)
        spread_s = np.sqrt(variance)
    return Fit(after, after_cov, weight, residual_s)


def limited(cov: Floats, largest: Floats) -> Floats:
    """The covariance, scaled so that no variance exceeds that of `largest`; correlations stay."""
    scale = np.sqrt(np.minimum(1.0, np.diag(largest) / np.diag(cov)))
    found: Floats = cov * np.outer(scale, scale)
    return found


def hierarchical(num: int, sd_own: float, sd_common: float) -> Floats:
    """Covariance `[num, num]` of factors that vary together and each by itself."""
    found: Floats = sd_own**2 * np.eye(num) + sd_common**2
    return found


def common_mean(mean: Floats, cov: Floats) -> tuple[float, float, Floats]:
    """(generalised least squares mean of factors, its standard deviation, that of each one's deviation from it)."""
    pull = np.linalg.solve(cov, np.ones(len(mean)))
    share = pull / pull.sum()
    away = np.eye(len(mean)) - share
    return float(share @ mean), float(pull.sum() ** -0.5), np.sqrt(np.maximum(_quadratic(away, cov), 0.0))


def _evidence(step: Step, own_var: float, mean: Floats, cov: Floats, other: Floats) -> float:
    """How much likelier errors are under another covariance of the factors, as a logarithm; stragglers are cut off."""
    error_s, noise_s2 = step.measured_s - step.expected_s @ mean, (own_var + step.shared_var) * step.load_s**2
    limit_s = MAX_SURPRISE * np.sqrt(_quadratic(step.expected_s, cov) + noise_s2)
    pull = step.pull(1.0 / (own_var * step.load_s**2))
    pulled, seen = pull @ np.clip(error_s, -limit_s, limit_s), pull @ step.expected_s
    return _log_likelihood(other, seen, pulled) - _log_likelihood(cov, seen, pulled)


def _log_likelihood(cov: Floats, seen: Floats, pulled: Floats) -> float:
    """Log-likelihood of errors `e ~ N(0, H P H' + R)`, up to terms without P, and without any n x n matrix."""
    spread = np.eye(len(cov)) + cov @ seen
    explained = pulled @ np.linalg.solve(spread, cov @ pulled)
    return 0.5 * float(explained - np.linalg.slogdet(spread)[1])


def _inverse(matrix: Floats) -> Floats:
    """Inverse of a symmetric matrix, symmetric to the last bit."""
    found: Floats = np.linalg.inv(matrix).astype(np.float64)
    return 0.5 * (found + found.T)


def _quadratic(rows: Floats, cov: Floats) -> Floats:
    """`h' P h` of every row h."""
    found: Floats = np.einsum("ij,ij->i", rows @ cov, rows)
    return found
