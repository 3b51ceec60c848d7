"""Peers re-expressed from their published description: first-fit-decreasing packing, and microbatches as verl's."""

from __future__ import annotations

import numpy as np

from dflop.cost.model import Floats
from dflop.schedule.items import Ints
from tests.bench.schedule.rivals import differencing

VERL_LINEAR = 24_576
"""Its work of a sequence of s tokens is `24576 s + s^2`: that of layers 4096 wide."""


def first_fit_decreasing(num_tokens: Ints, capacity: int) -> Ints:
    """Bin of every sample, longest first into the first bin with room; bins are numbered as they are opened.

    Raises:
        ValueError: a sample longer than the capacity.
    """
    if len(num_tokens) and int(num_tokens.max()) > capacity:
        raise ValueError(f"a sample of {int(num_tokens.max())} tokens fits in no bin of {capacity}")
    free = np.full(len(num_tokens), capacity, dtype=np.int64)
    bins = np.zeros(len(num_tokens), dtype=np.int64)
    for i in np.argsort(-num_tokens, kind="stable").tolist():
        bins[i] = int(np.argmax(free >= num_tokens[i]))
        free[bins[i]] -= num_tokens[i]
    return bins


def fitted_first_fit(num_tokens: Ints, num_bins: int) -> Ints:
    """First fit decreasing with about the least capacity for which so many bins are enough (found by bisection).

    More capacity may need more bins, so a little less might do, too; that is the search of MULTIFIT.
    """
    low = max(int(num_tokens.max()), -(-int(num_tokens.sum()) // num_bins))
    high = 2 * low  # every bin but one is then more than half full, and together they hold more than there is
    best = first_fit_decreasing(num_tokens, high)
    while low < high:
        middle = (low + high) // 2
        found = first_fit_decreasing(num_tokens, middle)
        if int(found.max()) < num_bins:
            best, high = found, middle
        else:
            low = middle + 1
    return best


def verl_microbatches(num_tokens: Ints, num_slots: int, num_ranks: int) -> tuple[Ints, Ints]:
    """(slot, rank) of every sample: differencing over ranks, then over a rank's microbatches, small ones at the ends.

    Source: `verl/utils/seqlen_balancing.py` of verl at 0db1343, retold. Ranks get equal counts of samples where the
    batch divides. A rank with fewer samples than microbatches leaves some empty, which verl would refuse.
    """
    work: Floats = VERL_LINEAR * num_tokens.astype(np.float64) + num_tokens.astype(np.float64) ** 2
    rank = differencing(work, num_ranks, equal_counts=len(work) % num_ranks == 0)
    slot = np.zeros(len(work), dtype=np.int64)
    for r in range(num_ranks):
        mine = np.flatnonzero(rank == r)
        if not len(mine):
            continue
        bucket = differencing(work[mine], num_slots)
        heaviest_first = np.argsort(-np.bincount(bucket, work[mine], num_slots), kind="stable")
        slots = np.concatenate([heaviest_first[::2][::-1], heaviest_first[1::2]])
        position = np.empty(num_slots, dtype=np.int64)
        position[slots] = np.arange(num_slots)
        slot[mine] = position[bucket]
    return slot, rank
