"""Tokens into buckets: longest first to the emptiest, and the cap that this can always keep."""

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
    longest_first = -np.sort(-num_tokens)
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
