"""Trees in which cells play for the least or the largest load, compiled: who wins is known after a few comparisons.

A search over thousands of ranks asks after every move for the heaviest and the lightest one. A tree answers at once and
costs a path to its root per change. Of equals the one with the smallest number wins, as in a loop from the first on.
"""

from __future__ import annotations

import numpy as np

from dflop.simulate.jit import kernel

NOBODY = -1
MOST_DEPTH = 64


@kernel
def num_leaves(num):  # type: ignore[no-untyped-def]  # numba infers them
    """The power of two that holds so many."""
    size = 1
    while size < num:
        size *= 2
    return size


@kernel
def play_least(tree, loads, first, i, is_out):  # type: ignore[no-untyped-def]  # numba infers them
    """Cell `first + i` has another load, or leaves or comes back; `tree[1]` is the one with the least load."""
    node = len(tree) // 2 + i
    tree[node] = NOBODY if is_out else i
    node //= 2
    while node:
        a, b = tree[2 * node], tree[2 * node + 1]
        tree[node] = b if a == NOBODY or (b != NOBODY and loads[first + b] < loads[first + a]) else a
        node //= 2


@kernel
def play_most(tree, loads, first, i):  # type: ignore[no-untyped-def]  # numba infers them
    """Cell `first + i` has another load; `tree[1]` is the one with the largest load."""
    node = len(tree) // 2 + i
    tree[node] = i
    node //= 2
    while node:
        a, b = tree[2 * node], tree[2 * node + 1]
        tree[node] = b if a == NOBODY or (b != NOBODY and loads[first + b] > loads[first + a]) else a
        node //= 2


@kernel
def first_fit(order, tokens, cap):  # type: ignore[no-untyped-def]  # numba infers them
    """Bin of every sample: the first one with room for it. A node holds the most room of any bin below it."""
    size = num_leaves(len(tokens))
    room = np.full(2 * size, cap, np.int64)
    bins = np.zeros(len(tokens), np.int64)
    for i in order:
        node = 1
        while node < size:
            node = 2 * node if room[2 * node] >= tokens[i] else 2 * node + 1
        bins[i] = node - size
        room[node] -= tokens[i]
        node //= 2
        while node:
            room[node] = max(room[2 * node], room[2 * node + 1])
            node //= 2
    return bins


@kernel
def greedy(  # type: ignore[no-untyped-def]  # numba infers them
    order, weights, tokens, pace, num_cells, num_buckets, cap
):
    """Bucket of every sample; that of the last one in `order` is -1 when a sample fitted nowhere.

    A node knows the least load, pace and tokens below it. What it could make of a sample at best is compared with the
    best cell found so far, so that few nodes are looked at. Cells of one pace lie side by side: so the bound is tight.
    """
    num_ranks, size = len(pace), num_leaves(num_cells)
    pace_of = pace[np.arange(num_cells) % num_ranks]
    cell_at = np.argsort(pace_of, kind="mergesort")
    leaf_of = np.empty(num_cells, np.int64)
    leaf_of[cell_at] = np.arange(num_cells)
    nothing = np.iinfo(np.int64).max
    load, tempo = np.zeros(2 * size, np.int64), np.ones(2 * size, np.int64)
    filled, number = np.full(2 * size, nothing), np.full(2 * size, nothing)
    for k in range(num_cells):
        tempo[size + k], filled[size + k], number[size + k] = pace_of[cell_at[k]], 0, cell_at[k]
    for node in range(size - 1, 0, -1):
        left, right = 2 * node, 2 * node + 1
        is_empty = filled[right] == nothing
        tempo[node] = tempo[left] if is_empty else min(tempo[left], tempo[right])
        filled[node], number[node] = min(filled[left], filled[right]), min(number[left], number[right])
    in_bucket, emptiest = np.zeros(num_buckets, np.int64), np.arange(num_cells)
    bucket, stack = np.full(len(order), -1, np.int64), np.empty(2 * MOST_DEPTH, np.int64)
    for i in order:
        best, lightest = _lightest(load, tempo, filled, number, stack, weights[i], cap - tokens[i])
        if best < 0:
            bucket[order[-1]] = -1
            return bucket
        bucket[i] = emptiest[best]
        in_bucket[emptiest[best]] += tokens[i]
        for b in range(best, num_buckets, num_cells):
            if in_bucket[b] < in_bucket[emptiest[best]] or (
                in_bucket[b] == in_bucket[emptiest[best]] and b < emptiest[best]
            ):
                emptiest[best] = b
        node = size + leaf_of[best]
        load[node], filled[node] = lightest, in_bucket[emptiest[best]]
        node //= 2
        while node:
            left, right = 2 * node, 2 * node + 1
            load[node] = load[left] if filled[right] == nothing else min(load[left], load[right])
            filled[node] = min(filled[left], filled[right])
            node //= 2
    return bucket


@kernel
def _lightest(load, tempo, filled, number, stack, weight, most_filled):  # type: ignore[no-untyped-def]  # numba infers them
    """(cell with room that a weight leaves lightest, its load then); (-1, 0) when none has room."""
    size, best, lightest = len(load) // 2, NOBODY, 0
    stack[0], height = 1, 1
    while height:
        height -= 1
        node = stack[height]
        if filled[node] > most_filled:
            continue
        after = load[node] + weight * tempo[node]
        if best >= 0 and (after > lightest or (after == lightest and number[node] > best)):
            continue
        if node >= size:
            best, lightest = number[node], after
            continue
        left, right = 2 * node, 2 * node + 1
        # The more promising one is looked at first: what it finds may spare the other.
        of_left, of_right = load[left] + weight * tempo[left], load[right] + weight * tempo[right]
        if of_right < of_left or (of_right == of_left and number[right] < number[left]):
            left, right = right, left
        stack[height], stack[height + 1] = right, left
        height += 2
    return best, lightest
