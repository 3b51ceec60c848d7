"""Media items of a slot over ranks: an encoder's, or those that share samples. O(items x ranks)."""

from __future__ import annotations

import numpy as np

from dflop.cost.model import Floats
from dflop.schedule.items import Ints
from dflop.simulate.jit import kernel


def split_items(
    slot: Ints, weights: Floats, num_slots: int, num_ranks: int, slowness: Floats | None = None
) -> Ints:  # fmt: skip
    """Encoder rank of every item: within its slot, heaviest first to the rank that ends first.

    Within 4/3 of the best split over equal ranks. What all ranks would need for an item is left out of the comparison:
    then equal ranks compare nothing but loads.
    """
    rank = np.zeros(len(slot), dtype=np.int64)
    slow = np.ones(num_ranks) if slowness is None else slowness
    if num_ranks > 1:
        _split(slot, weights, np.argsort(-weights, kind="stable"), np.zeros((num_slots, num_ranks)), slow, rank)
    return rank


def split_under_cap(
    slot: Ints,
    seconds: Floats,
    num_tokens: Ints,
    num_slots: int,
    num_ranks: int,
    slowness: Floats | None = None,
    *,
    cap_tokens: int | None,
) -> Ints:
    """Encoder rank of every item, by seconds; by tokens in the slots in which that would break the cap on a rank's."""
    rank = split_items(slot, seconds, num_slots, num_ranks, slowness)
    if cap_tokens is None:
        return rank
    total = np.bincount(slot * num_ranks + rank, num_tokens, num_slots * num_ranks).reshape(num_slots, num_ranks)
    is_over = (total.max(axis=1) > cap_tokens)[slot]
    if is_over.any():
        by_tokens = split_items(slot, num_tokens.astype(float), num_slots, num_ranks)
        rank = np.where(is_over, by_tokens, rank)
    return rank


@kernel
def _split(slot, weights, order, loads, slowness, rank):  # type: ignore[no-untyped-def]  # numba infers them
    more = slowness - slowness.min()
    for i in order:
        mine = loads[slot[i]]
        best = 0
        for r in range(1, len(mine)):
            if mine[r] + weights[i] * more[r] < mine[best] + weights[i] * more[best]:
                best = r
        rank[i] = best
        mine[best] += weights[i] * slowness[best]
