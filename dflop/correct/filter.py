"""Factors of sizes from stage times: a Kalman filter that stragglers do not move and sudden changes do.

A microbatch's seconds are a sum over buckets of sizes, `y = H r + noise`, with `H` the predicted seconds and `r` the
factors. A step may bring hundreds of microbatches for a few dozen factors, so they are taken in as information,
`P^-1 + H' R^-1 H`. Noise is of two kinds, a microbatch's own and what all of a rank share in a step (a checkpoint, a
burst of another job): without the second, dozens that agree in one slow step would prove that a level has moved. So
much of a rank's mean is taken out of its rows that their errors are independent. What strays far counts as less far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflop.correct.times import Ints, medians, sums
from dflop.cost.model import Floats

MIN_FACTOR, MAX_FACTOR = 0.25, 4.0
SD_BUCKET, SD_LEVEL = 0.3, 0.4
"""Of a factor before anything is known: each bucket's own, and one that all buckets of a module have in common."""
DRIFT_BUCKET, DRIFT_LEVEL = 0.01, 0.005
"""How far they move per step."""
START_NOISE_FRAC, MIN_NOISE_FRAC, MAX_NOISE_FRAC = 0.1, 0.003, 0.3
"""Standard deviation of a microbatch's relative error."""
SHARED_SD = 0.02
"""Of the relative error that a rank's microbatches share in a step."""
NOISE_RATE = 0.05
CUT_SD, CUT_SD_BEFORE = 2.0, 3.0
"""Standard deviations that a microbatch counts for at most: next to a fit, and next to what was believed before it."""
CHANGE_EVIDENCE = 3.0
"""Logarithm of how much likelier a step must be if factors have changed than if none has."""
MAD_TO_SD = 1.4826
"""Standard deviation of normal errors, in medians of their absolute values."""
NUM_ROUNDS = 8
"""Of cutting off and solving."""
MIN_LOAD_FRAC = 0.2
"""Of the mean microbatch: smaller ones are not expected to be more precise in seconds than this."""


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
        self._noise_var, self._num_updates = START_NOISE_FRAC**2, 0

    def update(self, expected_s: Floats, measured_s: Floats, rank: Ints) -> None:
        """Take in one step.

        Args:
            expected_s: `[n, K]`, uncorrected, per microbatch and factor; every row has a positive sum.
            measured_s: `[n]`, positive.
            rank: `[n]`, from 0, whose microbatch it was.
        """
        predicted_s = expected_s @ self.mean
        load_s = np.maximum(predicted_s, MIN_LOAD_FRAC * predicted_s.mean())
        step = Step(expected_s / load_s[:, None], (measured_s - predicted_s) / load_s, rank)
        self.cov, noise_var = limited(self.cov + self._drift_cov, self._prior_cov), self._noise_var
        if step.evidence(noise_var, self.cov, self._prior_cov) > CHANGE_EVIDENCE:
            # Factors that have changed, or only more noise than so far? What free factors leave unexplained is noise.
            noise_var = max(step.fitted(noise_var, self._prior_cov)[2], noise_var)
            if step.evidence(noise_var, self.cov, self._prior_cov) > CHANGE_EVIDENCE:
                self.cov = self._prior_cov
        change, self.cov, found_var = step.fitted(noise_var, self.cov)
        self.mean = np.clip(self.mean + change, MIN_FACTOR, MAX_FACTOR)
        self._num_updates += 1
        self._noise_var += max(1.0 / (self._num_updates + 1), NOISE_RATE) * (found_var - self._noise_var)

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
    """Measurements of one step, next to what was predicted."""

    rows: Floats
    """`[n, K]`, each factor's part in a microbatch."""
    error: Floats
    """`[n]`, relative."""
    rank: Ints
    """`[n]`, whose microbatch it is."""

    def evidence(self, noise_var: float, cov: Floats, other: Floats) -> float:
        """How much likelier errors are under another covariance of the factors, as a logarithm."""
        rows = self._independent(self.rows, noise_var)
        seen = rows.T @ rows / noise_var
        pulled = self._independent(rows, noise_var).T @ self._cut(self.error, noise_var, cov) / noise_var
        return _log_likelihood(other, seen, pulled) - _log_likelihood(cov, seen, pulled)

    def fitted(self, noise_var: float, cov: Floats) -> tuple[Floats, Floats, float]:
        """(change of the factors, their covariance, squared relative error that a typical microbatch has left)."""
        rows = self._independent(self.rows, noise_var)
        after = _inverse(_inverse(cov) + rows.T @ rows / noise_var)
        gain = after @ self._independent(rows, noise_var).T / noise_var
        believed, limit, num = self._cut(self.error, noise_var, cov), CUT_SD * np.sqrt(noise_var), self.rank.max() + 1
        for _ in range(NUM_ROUNDS):
            change: Floats = gain @ believed
            left = self.error - self.rows @ change
            left -= medians(left, self.rank, num)[self.rank]
            believed = self.error - left + np.clip(left, -limit, limit)
        # The fit took part in what it left.
        leverage = float(quadratic(rows, after).mean()) / noise_var + num / len(left)
        typical = MAD_TO_SD * float(np.median(np.abs(left)))
        found_var = typical**2 / max(1.0 - leverage, 0.25)
        return change, after, min(max(found_var, MIN_NOISE_FRAC**2), MAX_NOISE_FRAC**2)

    def _cut(self, error: Floats, noise_var: float, cov: Floats) -> Floats:
        limit = CUT_SD_BEFORE * np.sqrt(quadratic(self.rows, cov) + noise_var + SHARED_SD**2)
        return np.clip(error, -limit, limit)

    def _independent(self, rows: Floats, noise_var: float) -> Floats:
        """Rows less so much of their mean over the rank that their errors are independent, of variance `noise_var`."""
        num = np.maximum(np.bincount(self.rank), 1)
        part = (1.0 - np.sqrt(noise_var / (noise_var + num * SHARED_SD**2))) / num
        return rows - (sums(rows, self.rank, len(num)) * part[:, None])[self.rank]


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
    return float(share @ mean), float(pull.sum() ** -0.5), np.sqrt(np.maximum(quadratic(away, cov), 0.0))


def quadratic(rows: Floats, cov: Floats) -> Floats:
    """`h' P h` of every row h."""
    found: Floats = np.einsum("ij,ij->i", rows @ cov, rows)
    return found


def _log_likelihood(cov: Floats, seen: Floats, pulled: Floats) -> float:
    """Of errors `e ~ N(0, H P H' + R)`, but for what does not depend on P: without any n x n matrix."""
    spread = np.eye(len(cov)) + cov @ seen
    explained = pulled @ np.linalg.solve(spread, cov @ pulled)
    return 0.5 * float(explained - np.linalg.slogdet(spread)[1])


def _inverse(matrix: Floats) -> Floats:
    """Of a symmetric matrix, symmetric to the last bit."""
    found: Floats = np.linalg.inv(matrix).astype(np.float64)
    return 0.5 * (found + found.T)
