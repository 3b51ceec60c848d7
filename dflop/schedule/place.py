"""Samples into slots of chosen sizes: longest first, where the worst kind of stage stays relatively smallest.

The compiled greedy behind ramp seeds and plain balance, and the compiled split of a slot's media items over an
encoder's ranks. O(samples x buckets).
"""

from __future__ import annotations

import numpy as np

from dflop.cost.model import Floats
from dflop.schedule.items import Ints
from dflop.schedule.linear import LinearStep
from dflop.simulate.jit import kernel


def place(step: LinearStep, sizes: Floats) -> Ints:
    """Bucket `slot * ranks + rank` of every sample.

    Args:
        step: Seconds of every sample, and the cap on a bucket's tokens.
        sizes: `[slots]` relative size that each slot shall have, above 0.
    """
    bucket: Ints = _place(step.chain_s, step.slot_s, step.tokens, sizes, step.num_ranks, step.cap_tokens)
    return bucket


def split_items(slot: Ints, seconds: Floats, num_slots: int, num_ranks: int) -> Ints:
    """Encoder rank of every item: within its slot, longest first to the least loaded rank; see `split_lpt`."""
    if num_ranks == 1:
        return np.zeros(len(slot), dtype=np.int64)
    rank: Ints = _split(slot, seconds, np.argsort(-seconds, kind="stable"), num_slots, num_ranks)
    return rank


def split_lpt(seconds: Floats, num_ranks: int) -> list[int]:
    """Reference of `split_items` for one slot: rank of every item. Within 4/3 of the best split."""
    loads, rank = [0.0] * num_ranks, [0] * len(seconds)
    for item in sorted(range(len(seconds)), key=lambda i: (-seconds[i], i)):
        rank[item] = min(range(num_ranks), key=lambda r: (loads[r], r))
        loads[rank[item]] += float(seconds[item])
    return rank


@kernel
def _split(slot, seconds, order, num_slots, num_ranks):  # type: ignore[no-untyped-def]  # numba infers them
    loads = np.zeros((num_slots, num_ranks))
    rank = np.zeros(len(slot), np.int64)
    for i in order:
        mine = loads[slot[i]]
        best = 0
        for r in range(1, num_ranks):
            if mine[r] < mine[best]:
                best = r
        rank[i] = best
        mine[best] += seconds[i]
    return rank


@kernel
def _place(chain_s, slot_s, tokens, sizes, num_ranks, cap_tokens):  # type: ignore[no-untyped-def]  # numba infers them
    num_chain, num_samples = chain_s.shape
    num_encoder, num_slots = slot_s.shape[0], len(sizes)
    chain = np.zeros((num_slots, num_ranks, num_chain))
    encoder = np.zeros((num_slots, num_encoder))
    in_bucket = np.zeros((num_slots, num_ranks), np.int64)
    weight = np.zeros(num_samples)
    for i in range(num_samples):
        worst = total = 0.0
        for q in range(num_chain):
            worst, total = max(worst, chain_s[q, i]), total + chain_s[q, i]
        for q in range(num_encoder):
            worst, total = max(worst, num_ranks * slot_s[q, i]), total + num_ranks * slot_s[q, i]
        weight[i] = -(worst + 0.25 * total)
    bucket = np.zeros(num_samples, np.int64)
    for i in np.argsort(weight, kind="mergesort"):
        best, best_score = 0, np.inf
        for k in range(num_slots):
            shared = 0.0
            for q in range(num_encoder):
                shared = max(shared, encoder[k, q] + slot_s[q, i])
            for r in range(num_ranks):
                own = 0.0
                for q in range(num_chain):
                    own = max(own, chain[k, r, q] + chain_s[q, i])
                score = (max(shared, own) + 1e-3 * (shared + own)) / sizes[k]
                if in_bucket[k, r] + tokens[i] > cap_tokens:
                    score = 1e12 + in_bucket[k, r]
                if score < best_score:
                    best, best_score = k * num_ranks + r, score
        bucket[i] = best
        k, r = best // num_ranks, best % num_ranks
        in_bucket[k, r] += tokens[i]
        for q in range(num_chain):
            chain[k, r, q] += chain_s[q, i]
        for q in range(num_encoder):
            encoder[k, q] += slot_s[q, i]
    return bucket
