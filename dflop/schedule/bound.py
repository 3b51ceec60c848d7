"""Seconds that the slowest bucket of no assignment can stay below: what makes a balance certified."""

from __future__ import annotations

import itertools

import numpy as np

from dflop.cost.model import Floats

MAX_SAMPLES_PER_BUCKET = 8
"""How many the pigeonhole bound supposes in a bucket at most."""
MAX_CUTS = 128
"""Sizes at which the pair bound cuts."""


def lower_bound(weights_s: Floats, num_buckets: int) -> float:
    """The best of four bounds.

    The average; the longest sample; the pigeonhole bound on mixtures (for weights lam >= 0 with sum 1 the worst module
    of a bucket is at least lam . load, and among the k*m+1 largest samples some bucket holds k+1); the pair bound.

    Args:
        weights_s: `[N, C]`, seconds sample i brings to module c.
        num_buckets: m, at least 1.
    """
    n, modules = weights_s.shape
    if not n:
        return 0.0
    best = max(float(weights_s.sum(axis=0).max()) / num_buckets, float(weights_s.max()))
    mixed = weights_s @ _simplex(modules, 8 if modules <= 2 else 4).T
    most = min(MAX_SAMPLES_PER_BUCKET, (n - 1) // num_buckets)
    largest = -np.sort(-mixed, axis=0)[: most * num_buckets + 1]
    for k in range(1, most + 1):
        best = max(best, float(largest[k * num_buckets - k : k * num_buckets + 1].sum(axis=0).max()))
    return _pair_bound(weights_s, num_buckets, best)


def _pair_bound(weights_s: Floats, num_buckets: int, best: float) -> float:
    """Pigeonhole across modules: m+1 samples of which no two share a bucket below T, for one module or another.

    Samples of at least `a` seconds in module c clash when one brings T - a there, or both bring T/2 to module d: sample
    i is part of such a set up to T = max(w_ic + a, 2 w_id), so that the (m+1)-th largest of these is a bound.
    """
    large = weights_s[weights_s.max(axis=1) > best / 2]  # what is part of a set that clashes above `best`
    if len(large) <= num_buckets:
        return best
    for c, d in itertools.permutations(range(weights_s.shape[1]), 2):
        cuts = np.unique(large[:, c])
        for a in cuts[:: -(-len(cuts) // MAX_CUTS)]:
            clashing = large[large[:, c] >= a]
            if len(clashing) <= num_buckets:
                break
            ends = np.maximum(clashing[:, c] + a, 2 * clashing[:, d])
            best = max(best, float(np.partition(ends, -(num_buckets + 1))[-(num_buckets + 1)]))
    return best


def _simplex(modules: int, steps: int) -> Floats:
    """`[points, modules]`: every point of the simplex whose coordinates are multiples of 1/steps."""
    bars = itertools.combinations(range(steps + modules - 1), modules - 1)
    return np.array([np.diff([-1, *bar, steps + modules - 1]) - 1 for bar in bars]) / steps
