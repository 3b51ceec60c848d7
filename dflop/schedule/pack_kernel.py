"""The compiled half of `pack.py`: the same steps one number at a time, in the same order.

Seconds come as whole numbers in floats (`pack._in_ticks`): every sum is exact whatever its order, so that both halves
find the same assignment, and nothing is left over where a bucket has been emptied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dflop.simulate.jit import kernel

NOWHERE = -1
KICK_SWAPS = 3
"""Random swaps that leave a local optimum."""
MAX_KICKS = 400
"""In a row without anything better."""
DEAL_EVALS = 8
"""What dealing out a sample counts as, in evaluated moves."""
MAX_DEALT = 256
"""Samples of two buckets up to which they are dealt out anew."""


class Instance(NamedTuple):
    """What is packed: N samples, C modules, K token caps, all contiguous."""

    weights: Any
    """`[N, C]`."""
    tokens: Any
    """`[N, K]`."""
    caps: Any
    """`[K]`."""


class Buckets(NamedTuple):
    """An assignment, and what follows from it."""

    bucket: Any
    """`[N]`."""
    loads: Any
    """`[buckets, C]`."""
    filled: Any
    """`[buckets, K]` tokens."""
    heights: Any
    """`[buckets]` load of the worst module."""
    first: Any
    """`[buckets]`, with `after` the samples of every bucket in ascending order."""
    after: Any
    """`[N]`."""


@kernel
def next_random(state):  # type: ignore[no-untyped-def]  # numba infers them
    """Linear congruential generator modulo 2^31, of which the upper bits are used."""
    return (state * 1103515245 + 12345) & 0x7FFFFFFF


@kernel
def token_lpt_kernel(tokens, order, num_buckets):  # type: ignore[no-untyped-def]  # numba infers them
    """A binary heap of buckets, the one with the fewest tokens on top."""
    filled = np.zeros(num_buckets, np.int64)
    heap = np.arange(num_buckets)
    bucket = np.zeros(len(tokens), np.int64)
    for i in order:
        top = heap[0]
        bucket[i] = top
        filled[top] += tokens[i]
        hole, child = 0, 1
        while child < num_buckets:
            if child + 1 < num_buckets and _is_emptier(filled, heap[child + 1], heap[child]):
                child += 1
            if _is_emptier(filled, top, heap[child]):
                break
            heap[hole] = heap[child]
            hole, child = child, 2 * child + 1
        heap[hole] = top
    return bucket


@kernel
def _is_emptier(filled, a, b):  # type: ignore[no-untyped-def]  # numba infers them
    return filled[a] < filled[b] or (filled[a] == filled[b] and a < b)


@kernel
def vector_lpt_kernel(instance, order, num_buckets):  # type: ignore[no-untyped-def]  # numba infers them
    """Bucket of every sample; the first is `NOWHERE` when some sample has no place under the caps.

    Loads are module by module and the loops over buckets have no branch, so that they run four buckets at a time.
    """
    weights, tokens, caps = instance
    num_samples, num_modules = weights.shape
    loads, total = np.zeros((num_modules, num_buckets)), np.zeros(num_buckets)
    filled = np.zeros((num_buckets, len(caps)), np.int64)
    score = np.zeros(num_buckets)
    bucket = np.zeros(num_samples, np.int64)
    for i in order:
        for b in range(num_buckets):
            score[b] = loads[0, b] + weights[i, 0]
        for c in range(1, num_modules):
            for b in range(num_buckets):
                score[b] = max(score[b], loads[c, b] + weights[i, c])
        own = weights[i].sum()
        for b in range(num_buckets):
            score[b] += (total[b] + own) / 1024
        best = _lowest(score)
        if not _fits(filled[best], tokens[i], caps):  # rare: once more among those that have room
            for b in range(num_buckets):
                if not _fits(filled[b], tokens[i], caps):
                    score[b] = np.inf
            best = _lowest(score)
            if score[best] == np.inf:
                bucket[0] = NOWHERE
                return bucket
        bucket[i] = best
        total[best] += own
        for c in range(num_modules):
            loads[c, best] += weights[i, c]
        for q in range(len(caps)):
            filled[best, q] += tokens[i, q]
    return bucket


@kernel
def _lowest(score):  # type: ignore[no-untyped-def]  # numba infers them
    best = 0
    for b in range(1, len(score)):
        if score[b] < score[best]:
            best = b
    return best


@kernel
def _fits(filled, more, caps):  # type: ignore[no-untyped-def]  # numba infers them
    for q in range(len(caps)):  # noqa: SIM110  # numba knows no generators here
        if filled[q] + more[q] > caps[q]:
            return False
    return True


@kernel
def improve_kernel(instance, bucket, num_buckets, max_evals, target):  # type: ignore[no-untyped-def]  # numba infers them
    """(best assignment found from `bucket` on, evaluated exchanges)."""
    now = _buckets(instance, bucket.copy(), num_buckets)
    best, best_height = bucket.copy(), now.heights.max()
    state, evals, kicks = 1, 0, 0
    while True:
        evals, state = _descend(instance, now, max_evals, target, evals, state)
        height = now.heights.max()
        if height < best_height:
            best[:], best_height, kicks = now.bucket, height, 0
        if best_height <= target or evals >= max_evals or kicks == MAX_KICKS or num_buckets == 1:
            return best, evals
        if height > best_height:
            now = _buckets(instance, best.copy(), num_buckets)
        state = _kick(instance, now, state)
        kicks += 1


@kernel
def _buckets(instance, bucket, num_buckets):  # type: ignore[no-untyped-def]  # numba infers them
    loads = np.zeros((num_buckets, instance.weights.shape[1]))
    filled = np.zeros((num_buckets, len(instance.caps)), np.int64)
    heights = np.zeros(num_buckets)
    first, after = np.full(num_buckets, NOWHERE), np.full(len(bucket), NOWHERE)
    for i in range(len(bucket) - 1, -1, -1):
        b = bucket[i]
        loads[b] += instance.weights[i]
        filled[b] += instance.tokens[i]
        after[i], first[b] = first[b], i
    for b in range(num_buckets):
        heights[b] = loads[b].max()
    return Buckets(bucket, loads, filled, heights, first, after)


@kernel
def _descend(instance, now, max_evals, target, evals, state):  # type: ignore[no-untyped-def]  # numba infers them
    """Lowers the worst bucket with the first other one that can, until none can: (evals, state).

    By the best swap or move of one sample as long as there is one, then by dealing out the samples of both anew.
    """
    num_buckets, failures = len(now.first), 0
    inside, outside, both = np.empty((3, len(now.bucket)), np.int64)
    while failures < 2:
        worst = _highest(now.heights)
        if now.heights[worst] <= target:
            break
        size = _members(now, worst, inside)
        state = next_random(state)
        start, is_lower = state >> 8, False
        for step in range(num_buckets):
            other = (start + step) % num_buckets
            if other == worst or is_lower:
                continue
            num_others = _members(now, other, outside)
            if failures and size + num_others <= MAX_DEALT:
                both[:size], both[size : size + num_others] = inside[:size], outside[:num_others]
                evals += DEAL_EVALS * (size + num_others)
                if evals < max_evals:
                    is_lower, state = _deal(instance, now, worst, other, both[: size + num_others], state)
            elif not failures:
                evals += size * (num_others + 1)
                if evals < max_evals:
                    is_lower = _swap(instance, now, worst, other, inside[:size], outside[:num_others])
            if evals >= max_evals:
                return max_evals, state
        failures = 0 if is_lower else failures + 1
    return evals, state


@kernel
def _highest(heights):  # type: ignore[no-untyped-def]  # numba infers them
    best = 0
    for b in range(1, len(heights)):
        if heights[b] > heights[best]:
            best = b
    return best


@kernel
def _members(now, b, found):  # type: ignore[no-untyped-def]  # numba infers them
    """Writes down the samples of a bucket in ascending order: how many."""
    size, i = 0, now.first[b]
    while i != NOWHERE:
        found[size] = i
        size, i = size + 1, now.after[i]
    return size


@kernel
def _swap(instance, now, worst, other, inside, outside):  # type: ignore[no-untyped-def]  # numba infers them
    """Makes the swap that leaves the higher of both buckets lowest, if that is lower; a move is a swap with nothing."""
    weights = instance.weights
    mine, theirs, height = now.loads[worst], now.loads[other], now.heights[worst]
    found_i = found_j = NOWHERE
    for i in inside:
        for k in range(len(outside) + 1):
            j = outside[k] if k < len(outside) else NOWHERE
            value = 0.0
            for c in range(weights.shape[1]):
                more = weights[i, c] - (weights[j, c] if j >= 0 else 0.0)
                value = max(value, mine[c] - more, theirs[c] + more)
                if value >= height:
                    break
            if value < height and _may_swap(instance, now, worst, other, i, j):
                height, found_i, found_j = value, i, j
    if found_i == NOWHERE:
        return False
    _put(instance, now, found_i, other)
    if found_j != NOWHERE:
        _put(instance, now, found_j, worst)
    return True


@kernel
def _may_swap(instance, now, b, other, i, j):  # type: ignore[no-untyped-def]  # numba infers them
    """Whether bucket b may give sample i to another one for sample j under the caps."""
    for q in range(len(instance.caps)):
        more = instance.tokens[i, q] - (instance.tokens[j, q] if j != NOWHERE else 0)
        if now.filled[other, q] + more > instance.caps[q] or now.filled[b, q] - more > instance.caps[q]:
            return False
    return True


@kernel
def _deal(instance, now, worst, other, members, state):  # type: ignore[no-untyped-def]  # numba infers them
    """Deals the members of two buckets out anew, by `vector_lpt` in a random order; kept if it lowers the higher one.

    The order, in which `members` are left, is by a random mixture of modules, descending. Returns (is it kept, state).
    """
    weights, tokens, caps = instance
    num_modules = weights.shape[1]
    key = np.zeros(len(members))
    for c in range(num_modules):
        state = next_random(state)
        factor = (state >> 8) % 16 + 1
        for k in range(len(members)):
            key[k] += factor * weights[members[k], c]
    _sort_descending(members, key)
    loads, filled, total = np.zeros((2, num_modules)), np.zeros((2, len(caps)), np.int64), np.zeros(2)
    side = np.zeros(len(members), np.int64)
    for k in range(len(members)):
        i = members[k]
        best, best_score, best_high = NOWHERE, np.inf, np.inf
        for s in range(2):
            high = own = 0.0
            for c in range(num_modules):
                high = max(high, loads[s, c] + weights[i, c])
                own += weights[i, c]
            score = high + (total[s] + own) / 1024
            if score < best_score and _fits(filled[s], tokens[i], caps):
                best, best_score, best_high = s, score, high
        if best_high >= now.heights[worst]:
            return False, state
        side[k] = best
        for c in range(num_modules):
            loads[best, c] += weights[i, c]
            total[best] += weights[i, c]
        for q in range(len(caps)):
            filled[best, q] += tokens[i, q]
    for k in range(len(members)):
        b = other if side[k] else worst
        if now.bucket[members[k]] != b:
            _put(instance, now, members[k], b)
    return True, state


@kernel
def _sort_descending(members, key):  # type: ignore[no-untyped-def]  # numba infers them
    """Insertion sort: stable, and quick for the few samples of two buckets."""
    for k in range(1, len(members)):
        i, own, hole = members[k], key[k], k
        while hole > 0 and key[hole - 1] < own:
            members[hole], key[hole] = members[hole - 1], key[hole - 1]
            hole -= 1
        members[hole], key[hole] = i, own


@kernel
def _put(instance, now, i, b):  # type: ignore[no-untyped-def]  # numba infers them
    """Sample i out of its bucket and into b."""
    old, first, after = now.bucket[i], now.first, now.after
    now.bucket[i] = b
    now.heights[old] = now.heights[b] = 0.0
    for c in range(instance.weights.shape[1]):
        now.loads[old, c] -= instance.weights[i, c]
        now.loads[b, c] += instance.weights[i, c]
        now.heights[old] = max(now.heights[old], now.loads[old, c])
        now.heights[b] = max(now.heights[b], now.loads[b, c])
    for q in range(len(instance.caps)):
        now.filled[old, q] -= instance.tokens[i, q]
        now.filled[b, q] += instance.tokens[i, q]
    if first[old] == i:
        first[old] = after[i]
    else:
        j = first[old]
        while after[j] != i:
            j = after[j]
        after[j] = after[i]
    if first[b] == NOWHERE or first[b] > i:
        after[i], first[b] = first[b], i
    else:
        j = first[b]
        while after[j] != NOWHERE and after[j] < i:
            j = after[j]
        after[i], after[j] = after[j], i


@kernel
def _kick(instance, now, state):  # type: ignore[no-untyped-def]  # numba infers them
    """Random swaps between the worst bucket and others, where the caps allow them."""
    worst = _highest(now.heights)
    inside = np.empty(len(now.bucket), np.int64)
    for _ in range(KICK_SWAPS):
        size = _members(now, worst, inside)
        state = next_random(state)
        j = (state >> 8) % len(now.bucket)
        state = next_random(state)
        i = inside[(state >> 8) % size]
        other = now.bucket[j]
        if other != worst and _may_swap(instance, now, worst, other, i, j):
            _put(instance, now, i, other)
            _put(instance, now, j, worst)
    return state
