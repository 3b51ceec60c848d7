"""Karmarkar and Karp's largest differencing method: what trainers use that balance sequence lengths over ranks.

Each item starts as a partition with one non-empty part. The two partitions with the largest difference between their
heaviest and lightest parts are merged, heaviest parts with lightest ones, until one partition is left
(Karmarkar and Karp, 1982; verl and others balance data-parallel ranks so).
"""

from __future__ import annotations

import heapq

import numpy as np

from dflop.schedule.items import Ints


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
