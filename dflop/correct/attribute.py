"""Whose fault is it: what several modules on one stage took together, told apart by how microbatches mix them.

A stage of an inline plan is timed as a whole. With f the factors of its modules and p their predicted seconds, a
microbatch takes sum(f p), and as every microbatch mixes modules differently, a few of them determine f: least squares
on relative errors, a straggler weighted down (Huber's function). Where the mix hardly differs only the common part of
an error shows; what the data leave open stays as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

NOISE_FRAC = 0.05
"""Relative error of a microbatch beyond which it counts less."""
PRIOR_FRAC = 0.3
"""How far a factor is from its guess, roughly; a microbatch tells so much more the less noise it has."""
NUM_ROUNDS = 10
"""Of weighting and solving; the weights settle in a few."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one microbatch on one stage."""

    measured_s: float
    expected_s: Mapping[str, float]
    """Uncorrected prediction per module that has work in it."""


def module_factors(times: Sequence[StageTime], guess: Mapping[str, float]) -> dict[str, float]:
    """Factors on the expected seconds of each module; may come out as zero or less where there is nothing but noise.

    Args:
        times: At least one, of modules in `guess`.
        guess: What the factors are taken for as long as nothing speaks against it, positive.
    """
    names = list(guess)
    # In units of the guess and of what was measured: every row says that its shares add up to 1.
    share = np.array([[guess[n] * t.expected_s.get(n, 0.0) / t.measured_s for n in names] for t in times])
    prior = (NOISE_FRAC / PRIOR_FRAC) ** 2
    found = np.ones(len(names))
    for _ in range(NUM_ROUNDS):
        error = np.abs(share @ found - 1.0)
        weight = (NOISE_FRAC / np.maximum(error, NOISE_FRAC))[:, np.newaxis]
        normal = share.T @ (weight * share) + prior * np.eye(len(names))
        found = np.linalg.solve(normal, share.T @ weight[:, 0] + prior)
    return {name: guess[name] * float(f) for name, f in zip(names, found, strict=True)}
