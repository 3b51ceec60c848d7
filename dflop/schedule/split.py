"""One microbatch's media items over the data-parallel ranks of their encoder: longest processing time first.

LPT is within 4/3 of the best split, typically within a per cent from a dozen items on, and costs microseconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def split_lpt(ids: Sequence[int], seconds: Sequence[float], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Owner per rank, each ascending: the longest item first, always to the least loaded rank.

    Args:
        ids: Items to place.
        seconds: Seconds of every item of the batch, indexed by id.
        num_ranks: Data-parallel degree of the encoder.
    """
    loads = [(0.0, rank) for rank in range(num_ranks)]
    owned: list[list[int]] = [[] for _ in range(num_ranks)]
    for item in sorted(ids, key=lambda i: (-seconds[i], i)):
        load, rank = loads[0]
        owned[rank].append(item)
        heapq.heapreplace(loads, (load + seconds[item], rank))
    return tuple(tuple(sorted(part)) for part in owned)
