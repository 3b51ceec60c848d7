"""Items by size: buckets of tokens that each hold about the same share of a module's seconds.

Equal shares of the seconds, not of the items: what a factor is worth, and how well it can be learnt, goes with the
time that it corrects.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflop.cost.model import Floats
from dflop.simulate.kernel import Ints

NUM_BUCKETS = 12


def bucket_edges(tokens: Ints, seconds: Floats, weights: Floats, num_buckets: int = NUM_BUCKETS) -> tuple[int, ...]:
    """Where buckets begin: at quantiles of predicted seconds.

    Args:
        tokens: `[N]`, of each item.
        seconds: `[N]`, predicted, finite and not negative.
        weights: `[N]`, how often an item is drawn.
        num_buckets: At most so many; fewer where many items have one size.

    Returns:
        `edges[i]` = tokens at which bucket i + 1 begins, ascending; no bucket is without items.
    """
    sizes, of_item = np.unique(tokens, return_inverse=True)
    if len(sizes) < 2:
        return ()
    cost = np.bincount(of_item, weights=np.asarray(seconds) * weights, minlength=len(sizes))
    if cost.sum() <= 0:
        return ()
    below = np.concatenate([[0.0], np.cumsum(cost)]) / cost.sum()
    # The gap between two sizes that is nearest to each quantile.
    cuts = {int(np.abs(below - i / num_buckets).argmin()) for i in range(1, num_buckets)}
    return tuple(int(sizes[cut]) for cut in sorted(cuts) if 0 < cut < len(sizes))


def bucket_of(tokens: Ints, edges: Sequence[int]) -> Ints:
    """`[N]`, the bucket of every item."""
    return np.searchsorted(np.asarray(edges, dtype=np.int64), tokens, side="right").astype(np.int64)


def typical_tokens(edges: Sequence[int]) -> Ints:
    """`[num_buckets]`, a size inside of each bucket: to look up what is known by other edges."""
    if not edges:
        return np.zeros(1, dtype=np.int64)
    starts = np.asarray(edges, dtype=np.int64)
    return np.concatenate([[starts[0] - 1], (starts[:-1] + starts[1:]) // 2, [starts[-1]]])
