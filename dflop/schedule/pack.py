"""Tokens into buckets: longest first to the emptiest, and the cap that this can always keep; largest differencing.

In Karmarkar and Karp's method (1982) each item starts as a partition with one non-empty part. The two partitions with
the largest difference between their heaviest and lightest parts are merged, heaviest parts with lightest ones, until
one partition is left. So verl and others balance sequence lengths over data-parallel ranks.
"""

from __future__ import annotations

import heapq

import numpy as np

from dflop.schedule.items import Ints

TOKEN_CAP_RATIO = 1.25
"""Largest bucket over the average one: what balancing seconds needs in spare tokens."""


def token_cap(num_tokens: Ints, num_buckets: int) -> int:
    """Tokens no bucket may exceed: 1.25 times the average, more only where samples are too long for that.

    Never below the largest bucket of LPT on the tokens, so that some assignment keeps it.
    """
    if not len(num_tokens):
        return 0
    is_sorted = not (num_tokens[1:] > num_tokens[:-1]).any()
    longest_first = num_tokens if is_sorted else -np.sort(-num_tokens)
    cap = max(int(np.ceil(TOKEN_CAP_RATIO * num_tokens.sum() / num_buckets)), int(longest_first[0]))
    # Under LPT the bucket a sample comes to had at most the average of what was placed before.
    before = np.cumsum(longest_first) - longest_first
    if (before / num_buckets + longest_first).max() <= cap:
        return cap
    lpt = token_lpt(longest_first, num_buckets)
    return max(cap, int(np.bincount(lpt, weights=longest_first, minlength=num_buckets).max()))


def token_lpt(num_tokens: Ints, num_buckets: int) -> Ints:
    """Bucket of every sample, longest first to the bucket with the fewest tokens."""
    order = np.argsort(-num_tokens, kind="stable")
    heap = [(0, b) for b in range(num_buckets)]
    bucket = np.zeros(len(num_tokens), dtype=np.int64)
    for i, tokens in zip(order.tolist(), num_tokens[order].tolist(), strict=True):
        load, b = heap[0]
        bucket[i] = b
        heapq.heapreplace(heap, (load + tokens, b))
    return bucket


def partition(weights: Ints, num_parts: int) -> Ints:
    """`[N]`: part of each item; parts are about equally heavy, the heaviest is part 0.

    Args:
        weights: `[N]`, not negative.
        num_parts: At least 1.
    """
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    others = [(0, list[int]())] * (num_parts - 1)
    for item, weight in enumerate(weights.tolist()):
        parts = [(weight, [item]), *others]
        heapq.heappush(heap, (-weight if num_parts > 1 else 0, item, parts))
    number = len(heap)
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        both = [(a + b, [*x, *y]) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        both.sort(key=lambda part: (-part[0], -len(part[1])))
        heapq.heappush(heap, (both[-1][0] - both[0][0], number, both))
        number += 1
    found = np.zeros(len(weights), dtype=np.int64)
    for _, _, parts in heap:
        for k, (_, items) in enumerate(parts):
            found[items] = k
    return found


def over_ranks(weights: Ints, num_ranks: int, num_slots: int) -> tuple[Ints, Ints]:
    """(slot, rank) `[N]`: items balanced over ranks, then those of each rank over slots, heavy slots side by side."""
    rank, slot = partition(weights, num_ranks), np.zeros(len(weights), dtype=np.int64)
    for k in range(num_ranks):
        mine = np.flatnonzero(rank == k)
        slot[mine] = partition(weights[mine], num_slots)
    return slot, rank
