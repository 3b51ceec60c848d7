"""The compiled twin of `rank_search.py`: the same choices in the same order, nothing computed twice.

Samples of a cell are a linked list; loads, tokens, counts and who is heaviest and lightest (`tournament.py`) follow
every move. A move costs about a nanosecond per pair of samples it looks at, and hardly more with thousands of ranks
than with a few.
"""

from __future__ import annotations

import numpy as np

from dflop.schedule.tournament import NOBODY, num_leaves, play_least, play_most
from dflop.simulate.jit import kernel


@kernel
def search(  # type: ignore[no-untyped-def]  # numba infers them
    start, weights, tokens, pace, num_cells, num_buckets, cap, fixed, keep_full, target, max_evals, max_kicks,
    swaps_per_kick, max_partners,
):  # fmt: skip
    """Best bucket of every sample; see `rank_search.search`."""
    num_ranks = len(pace)
    num_samples, num_groups = len(start), num_cells // num_ranks
    bucket = start.copy()
    loads = np.zeros(num_cells, np.int64)
    in_bucket, counts = np.zeros(num_buckets, np.int64), np.zeros(num_buckets, np.int64)
    head, after, before = np.full(num_cells, -1), np.full(num_samples, -1), np.full(num_samples, -1)
    for i in range(num_samples):
        b = bucket[i]
        loads[b % num_cells] += (weights[i] + (fixed if counts[b] == 0 else 0)) * pace[b % num_ranks]
        in_bucket[b] += tokens[i]
        counts[b] += 1
        _link(head, after, before, i, b % num_cells)
    size = num_leaves(num_ranks)
    most, least = np.full((num_groups, 2 * size), NOBODY), np.full((num_groups, 2 * size), NOBODY)
    total, counted = np.zeros(num_groups, np.int64), np.zeros(num_cells, np.int64)
    for c in range(num_cells):
        _count(c, loads, counted, total, most, least, num_ranks)
    is_stuck, seen = np.zeros(num_groups, np.bool_), np.empty(max_partners, np.int64)
    best, best_step, kicks, random, evals_left, has_changed = bucket.copy(), -1, 0, 1, max_evals, False
    moved, num_moved = np.empty(num_samples, np.int64), 0  # since the best; beyond so many all are copied
    while True:
        step = 0
        for g in range(num_groups):
            step += loads[g * num_ranks + most[g, 1]]
        if best_step < 0:
            best_step = step
        elif step < best_step:
            best_step, kicks = step, 0
            _catch_up(best, bucket, moved, num_moved)
            num_moved = 0
        if best_step <= target or kicks > max_kicks:
            return best
        group, is_free = _idlest(loads, num_ranks, most, total, is_stuck)
        heavy = group * num_ranks + most[group, 1]
        if not is_free and has_changed:
            has_changed = False
            is_stuck[:] = False
            continue
        if not is_free:
            for _ in range(swaps_per_kick):
                random = (random * 1103515245 + 12345) % 2147483648
                i = _draw_inside(head, after, heavy, num_samples, random)
                random = (random * 1103515245 + 12345) % 2147483648
                j = _draw_outside(bucket, num_cells, heavy, random)
                if i < 0 or j < 0:
                    break
                longer = tokens[i] - tokens[j]
                if in_bucket[bucket[i]] - longer <= cap and in_bucket[bucket[j]] + longer <= cap:
                    _swap(bucket, weights, tokens, pace, loads, in_bucket, head, after, before, num_cells, i, j)
                    _count(heavy, loads, counted, total, most, least, num_ranks)
                    _count(bucket[i] % num_cells, loads, counted, total, most, least, num_ranks)
                    num_moved = _note(moved, num_moved, i, j)
            kicks += 1
            is_stuck[:] = False
            continue
        num_inside, num_seen = _length(head, after, heavy), 0
        is_stuck[group] = True
        for _ in range(max_partners):
            light, slack = _slackest(loads, num_ranks, most, least)
            if light < 0:
                break
            play_least(least[light // num_ranks], loads, light - light % num_ranks, light % num_ranks, True)
            seen[num_seen] = light
            num_seen += 1
            evals_left -= num_inside * (_length(head, after, light) + 1)
            if evals_left < 0:
                return best
            goal = light
            for b in range(light, num_buckets, num_cells):
                if in_bucket[b] < in_bucket[goal]:
                    goal = b
            value, i, j = _best_exchange(
                bucket, weights, tokens, in_bucket, counts, head, after, heavy, light, goal, loads[heavy], slack, cap,
                fixed, keep_full, pace[heavy % num_ranks], pace[light % num_ranks],
            )  # fmt: skip
            if value < loads[heavy]:
                if j >= 0:
                    _swap(bucket, weights, tokens, pace, loads, in_bucket, head, after, before, num_cells, i, j)
                else:
                    source = bucket[i]
                    loads[heavy] -= fixed * pace[heavy % num_ranks] if counts[source] == 1 else 0
                    loads[light] += fixed * pace[light % num_ranks] if counts[goal] == 0 else 0
                    _move(
                        bucket, weights, tokens, pace, loads, in_bucket, counts, head, after, before, num_cells, i, goal
                    )
                _count(heavy, loads, counted, total, most, least, num_ranks)
                _count(light, loads, counted, total, most, least, num_ranks)
                num_moved = _note(moved, num_moved, i, j)
                has_changed = True
                is_stuck[group] = False
                break
        for k in range(num_seen):
            c = seen[k]
            play_least(least[c // num_ranks], loads, c - c % num_ranks, c % num_ranks, False)


@kernel
def _best_exchange(  # type: ignore[no-untyped-def]  # numba infers them
    bucket, weights, tokens, in_bucket, counts, head, after, heavy, light, goal, heavy_load, slack, cap, fixed,
    keep_full, of_heavy, of_light,
):  # fmt: skip
    """(value, sample that leaves, sample that comes or -1); of equals the first samples, a swap before a move."""
    best, best_i, best_j = np.iinfo(np.int64).max, -1, -1
    light_load, num_samples = heavy_load - slack, len(bucket)
    i = head[heavy]
    while i >= 0:
        source = bucket[i]
        j = head[light]
        while j >= 0:
            delta = weights[i] - weights[j]
            value = max(heavy_load - delta * of_heavy, light_load + delta * of_light)
            if value < best or (value == best and (i < best_i or (i == best_i and j < best_j))):
                longer = tokens[i] - tokens[j]
                if in_bucket[source] - longer <= cap and in_bucket[bucket[j]] + longer <= cap:
                    best, best_i, best_j = value, i, j
            j = after[j]
        if in_bucket[goal] + tokens[i] <= cap and not (keep_full and counts[source] == 1):
            heavy_after = heavy_load - (weights[i] + (fixed if counts[source] == 1 else 0)) * of_heavy
            value = max(heavy_after, light_load + (weights[i] + (fixed if counts[goal] == 0 else 0)) * of_light)
            if value < best or (value == best and i < best_i):
                best, best_i, best_j = value, i, num_samples
        i = after[i]
    return best, best_i, best_j if best_j < num_samples else -1


@kernel
def _count(c, loads, counted, total, most, least, num_ranks):  # type: ignore[no-untyped-def]  # numba infers them
    """Takes in that the load of a cell has changed."""
    g, i = c // num_ranks, c % num_ranks
    total[g] += loads[c] - counted[c]
    counted[c] = loads[c]
    play_most(most[g], loads, c - i, i)
    play_least(least[g], loads, c - i, i, False)


@kernel
def _idlest(loads, num_ranks, most, total, is_stuck):  # type: ignore[no-untyped-def]  # numba infers them
    """(group with the most idle weight, True) among those not stuck; if all are, (the one among all, False)."""
    free, most_of_free, any_group, highest = -1, -1, 0, -1
    for g in range(len(total)):
        idle = loads[g * num_ranks + most[g, 1]] * num_ranks - total[g]
        if idle > highest:
            any_group, highest = g, idle
        if not is_stuck[g] and idle > most_of_free:
            free, most_of_free = g, idle
    return (free, True) if free >= 0 else (any_group, False)


@kernel
def _slackest(loads, num_ranks, most, least):  # type: ignore[no-untyped-def]  # numba infers them
    """(cell furthest below the heaviest one of its group, by how much), of those not tried yet; (-1, 0) without any."""
    light, slack = -1, 0
    for g in range(len(most)):
        c = g * num_ranks + least[g, 1]
        if least[g, 1] >= 0 and loads[g * num_ranks + most[g, 1]] - loads[c] > slack:
            light, slack = c, loads[g * num_ranks + most[g, 1]] - loads[c]
    return light, slack


@kernel
def _note(moved, num_moved, i, j):  # type: ignore[no-untyped-def]  # numba infers them
    """Writes down samples that have moved, -1 for none, as long as there is room; how many there are by now."""
    for sample in (i, j):
        if sample >= 0:
            if num_moved < len(moved):
                moved[num_moved] = sample
            num_moved += 1
    return num_moved


@kernel
def _catch_up(best, bucket, moved, num_moved):  # type: ignore[no-untyped-def]  # numba infers them
    if num_moved > len(moved):
        best[:] = bucket
        return
    for k in range(num_moved):
        best[moved[k]] = bucket[moved[k]]


@kernel
def _move(  # type: ignore[no-untyped-def]  # numba infers them
    bucket, weights, tokens, pace, loads, in_bucket, counts, head, after, before, num_cells, i, goal
):
    source = bucket[i]
    loads[source % num_cells] -= weights[i] * pace[source % len(pace)]
    loads[goal % num_cells] += weights[i] * pace[goal % len(pace)]
    in_bucket[source] -= tokens[i]
    in_bucket[goal] += tokens[i]
    counts[source] -= 1
    counts[goal] += 1
    bucket[i] = goal
    _unlink(head, after, before, i, source % num_cells)
    _link(head, after, before, i, goal % num_cells)


@kernel
def _swap(  # type: ignore[no-untyped-def]  # numba infers them
    bucket, weights, tokens, pace, loads, in_bucket, head, after, before, num_cells, i, j
):
    a, b = bucket[i], bucket[j]
    delta, longer = weights[i] - weights[j], tokens[i] - tokens[j]
    loads[a % num_cells] -= delta * pace[a % len(pace)]
    loads[b % num_cells] += delta * pace[b % len(pace)]
    in_bucket[a] -= longer
    in_bucket[b] += longer
    bucket[i], bucket[j] = b, a
    _unlink(head, after, before, i, a % num_cells)
    _unlink(head, after, before, j, b % num_cells)
    _link(head, after, before, i, b % num_cells)
    _link(head, after, before, j, a % num_cells)


@kernel
def _link(head, after, before, i, cell):  # type: ignore[no-untyped-def]  # numba infers them
    after[i], before[i] = head[cell], -1
    if head[cell] >= 0:
        before[head[cell]] = i
    head[cell] = i


@kernel
def _unlink(head, after, before, i, cell):  # type: ignore[no-untyped-def]  # numba infers them
    if before[i] >= 0:
        after[before[i]] = after[i]
    else:
        head[cell] = after[i]
    if after[i] >= 0:
        before[after[i]] = before[i]


@kernel
def _length(head, after, cell):  # type: ignore[no-untyped-def]  # numba infers them
    length, i = 0, head[cell]
    while i >= 0:
        length, i = length + 1, after[i]
    return length


@kernel
def _draw_inside(head, after, cell, num_samples, random):  # type: ignore[no-untyped-def]  # numba infers them
    """The first sample of the cell, counted from a random one on; -1 when there is none."""
    start, found, nearest = random % num_samples, -1, num_samples
    i = head[cell]
    while i >= 0:
        distance = (i - start) % num_samples
        if distance < nearest:
            found, nearest = i, distance
        i = after[i]
    return found


@kernel
def _draw_outside(bucket, num_cells, cell, random):  # type: ignore[no-untyped-def]  # numba infers them
    """The first sample of any other cell, counted from a random one on; -1 when there is none."""
    num_samples = len(bucket)
    for k in range(num_samples):
        i = (random + k) % num_samples
        if bucket[i] % num_cells != cell:
            return i
    return -1
