"""Samples over data-parallel ranks, compiled: a greedy start, and moves and swaps out of the heaviest rank.

Bucket `slot * num_ranks + rank` is one microbatch of one rank. Ranks wait for one another either once per step or in
every slot, and one pair of words covers both: a *cell* is what is summed up before anyone waits (a rank's whole step,
or one bucket), a *group* is the cells that wait for one another (all ranks, or a slot). A bucket `b` is part of cell
`b % num_cells`, a cell `c` of group `c // num_ranks`, and a step lasts the sum over groups of their heaviest cells.
Both are of rank `% num_ranks`; what a rank holds weighs `pace` times as much, so that a slow one is given less.

All numbers are integers, so that additions in another order, another machine or another compiler change nothing:
ranks that plan for themselves must come to the same plan to the last sample.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dflop.schedule.items import Ints
from dflop.simulate.jit import IS_COMPILED, kernel

MAX_KICKS = 8
"""Random disturbances in a row that led to nothing before the search gives up."""
SWAPS_PER_KICK = 3
MAX_PARTNERS = 64
"""Cells with most slack that are tried, one after the other, for the heaviest one."""
NOBODY = -1
BLOCK = 32
"""Neighbouring buckets or cells that are passed over together where even the emptiest of them could not win."""


class RankProblem(NamedTuple):
    """One global batch to be placed."""

    weights: Ints
    """`[samples]` seconds in integer units."""
    tokens: Ints
    """`[samples]`, none above the cap."""
    num_ranks: int
    num_cells: int
    num_buckets: int
    cap: int
    """Tokens of a bucket."""
    fixed: int
    """Weight of a bucket that is not empty."""
    pace: Ints
    """`[ranks]` all 1 where ranks are equally fast."""
    limits: Ints
    """Tokens of a bucket, ascending, above each of which one more layer runs again."""
    rerun: Ints
    """`[samples]` weight of such a layer."""
    rerun_fixed: int
    """What it weighs on top, whatever the bucket holds."""

    @property
    def keep_full(self) -> bool:
        """Whether no bucket may be left empty: always when there are samples enough."""
        return len(self.weights) >= self.num_buckets

    @property
    def is_uneven(self) -> bool:
        """Whether some rank has another pace than 1."""
        return bool((self.pace != 1).any())

    def loads(self, bucket: Ints) -> Ints:
        """`[cells]` weight at its rank's pace, fixed parts included."""
        is_used = np.bincount(bucket, minlength=self.num_buckets) > 0
        loads = np.zeros(self.num_cells, dtype=np.int64)
        np.add.at(loads, bucket % self.num_cells, self.weights)
        np.add.at(loads, np.flatnonzero(is_used) % self.num_cells, self.fixed)
        filled, rerun = np.zeros((2, self.num_buckets), dtype=np.int64)
        np.add.at(filled, bucket, self.tokens)
        np.add.at(rerun, bucket, self.rerun)
        again = np.searchsorted(self.limits, filled) * (rerun + self.rerun_fixed)
        np.add.at(loads, np.arange(self.num_buckets) % self.num_cells, again)
        return loads * np.tile(self.pace, self.num_cells // self.num_ranks)

    def step(self, bucket: Ints) -> int:
        """Sum over groups of the heaviest cell: what the search makes small."""
        return int(self.loads(bucket).reshape(-1, self.num_ranks).max(axis=1).sum())


class Now(NamedTuple):
    """An assignment under way, and what follows from it."""

    bucket: Ints
    """`[samples]`."""
    loads: Ints
    """`[cells]`."""
    filled: Ints
    """`[buckets]` tokens."""
    counts: Ints
    """`[buckets]` samples."""
    rerun: Ints
    """`[buckets]` weight of a layer that runs again."""
    first: Ints
    """`[cells]` any sample of it, from where `after` leads to the others."""
    after: Ints
    """`[samples]`."""


def greedy(problem: RankProblem, weights: Ints, num_cells: int, pace: Ints) -> Ints | None:
    """Largest weight first to the cell with room that it leaves lightest, there into the bucket with the fewest tokens.

    Args:
        problem: Says how many buckets there are and what fits.
        weights: `[samples]`: the problem's own, or tokens.
        num_cells: The problem's own, or `num_buckets`: every bucket for itself.
        pace: `[ranks]` of the weights.

    Returns:
        Bucket of every sample; None when one fitted nowhere.
    """
    found: Ints = _greedy(
        np.argsort(-weights, kind="stable"), weights, problem.tokens, pace, num_cells, problem.num_buckets, problem.cap
    )
    return None if found[0] == NOBODY else found


def first_fit(tokens: Ints, cap: int) -> Ints:
    """Bins of at most `cap` tokens, longest sample first into the first one with room: bin of every sample."""
    bins: Ints = _first_fit(np.argsort(-tokens, kind="stable"), tokens, cap)
    return bins


def improve(problem: RankProblem, bucket: Ints, target: int, max_evals: int) -> Ints:
    """Best assignment found by moving and swapping samples out of the heaviest cells.

    Args:
        problem: What to place.
        bucket: `[samples]`, an assignment within the cap; not changed.
        target: Good enough: stops here.
        max_evals: Moves and swaps looked at.
    """
    start, keep_full, now = bucket.astype(np.int64), problem.keep_full, empty(problem, len(bucket))
    if not IS_COMPILED:  # an element of a list takes Python a third of the time that one of an array does
        problem, now = _as_lists(problem), _as_lists(now)
        return np.array(_improve(problem, keep_full, now, start.tolist(), target, max_evals))
    found: Ints = _improve(problem, keep_full, now, start, target, max_evals)
    return found


def empty(problem: RankProblem, num_samples: int) -> Now:
    """An assignment of nothing yet."""
    num_cells, buckets = problem.num_cells, np.zeros(problem.num_buckets, dtype=np.int64)
    return Now(
        bucket=np.zeros(num_samples, dtype=np.int64),
        loads=np.zeros(num_cells, dtype=np.int64),
        filled=buckets,
        counts=buckets.copy(),
        rerun=buckets.copy(),
        first=np.full(num_cells, NOBODY),
        after=np.full(num_samples, NOBODY),
    )


def _as_lists(of: Any) -> Any:
    return of._replace(**{k: v.tolist() for k, v in of._asdict().items() if isinstance(v, np.ndarray)})


@kernel
def _greedy(order, weights, tokens, pace, num_cells, num_buckets, cap):  # type: ignore[no-untyped-def]  # numba infers them
    num_ranks = len(pace)
    loads, filled = np.zeros(num_cells, np.int64), np.zeros(num_buckets, np.int64)
    emptiest, least = np.arange(num_cells), np.zeros(num_cells, np.int64)
    bucket, fastest = np.zeros(len(order), np.int64), pace.min()
    lowest = np.zeros((num_cells + BLOCK - 1) // BLOCK, np.int64)  # load of a block's cells
    for i in order:
        best, lightest = NOBODY, 0
        for block in range(len(lowest)):
            if best >= 0 and lowest[block] + weights[i] * fastest >= lightest:
                continue
            for c in range(block * BLOCK, min((block + 1) * BLOCK, num_cells)):
                after = loads[c] + weights[i] * pace[c % num_ranks]
                if (best < 0 or after < lightest) and least[c] + tokens[i] <= cap:
                    best, lightest = c, after
        if best < 0:
            bucket[0] = NOBODY
            return bucket
        bucket[i] = emptiest[best]
        loads[best] = lightest
        block = best // BLOCK
        lowest[block] = loads[block * BLOCK : (block + 1) * BLOCK].min()
        filled[emptiest[best]] += tokens[i]
        for b in range(best, num_buckets, num_cells):
            goal = emptiest[best]
            if filled[b] < filled[goal] or (filled[b] == filled[goal] and b < goal):
                emptiest[best] = b
        least[best] = filled[emptiest[best]]
    return bucket


@kernel
def _first_fit(order, tokens, cap):  # type: ignore[no-untyped-def]  # numba infers them
    room, bins = np.full(len(tokens), cap, np.int64), np.zeros(len(tokens), np.int64)
    for i in order:
        while room[bins[i]] < tokens[i]:
            bins[i] += 1
        room[bins[i]] -= tokens[i]
    return bins


@kernel
def _improve(problem, keep_full, now, best, target, max_evals):  # type: ignore[no-untyped-def]  # numba infers them
    num_ranks, num_groups = problem.num_ranks, problem.num_cells // problem.num_ranks
    for i in range(len(best)):
        _put(problem, now, i, best[i])
    is_stuck, is_tried = np.zeros(num_groups, np.bool_), np.zeros(problem.num_cells, np.bool_)
    heaviest, idle = np.zeros(num_groups, np.int64), np.zeros(num_groups, np.int64)
    best_step, kicks, random, evals, has_changed = -1, 0, 1, 0, False
    while True:
        step = 0
        for g in range(num_groups):
            own = now.loads[g * num_ranks : (g + 1) * num_ranks]
            heaviest[g] = g * num_ranks + np.argmax(own)
            step += now.loads[heaviest[g]]
            idle[g] = now.loads[heaviest[g]] * num_ranks - sum(own)
        if best_step < 0 or step < best_step:
            best[:], best_step, kicks = now.bucket, step, 0
        if best_step <= target or kicks > MAX_KICKS or evals >= max_evals:
            return best
        group = NOBODY
        for g in range(num_groups):
            if not is_stuck[g] and (group < 0 or idle[g] > idle[group]):
                group = g
        if group < 0:
            if not has_changed:
                random = _kick(problem, now, heaviest[np.argmax(idle)], random)
                kicks += 1
            has_changed, is_stuck[:] = False, False
            continue
        is_moved, evals = _relieve(problem, keep_full, now, heaviest, heaviest[group], is_tried, evals, max_evals)
        has_changed, is_stuck[group] = has_changed or is_moved, not is_moved


@kernel
def _relieve(problem, keep_full, now, heaviest, heavy, is_tried, evals, max_evals):  # type: ignore[no-untyped-def]  # numba infers them
    """Moves something from the heavy cell to the cell with most slack that can take it: (is it moved, evals).

    The light cell is seen as if its group were as heavy as the heavy cell's: only slack counts.
    """
    num_ranks, inside = problem.num_ranks, _length(now, heavy)
    is_tried[:] = False
    for _ in range(MAX_PARTNERS if inside else 0):
        light, slack = NOBODY, 0
        for c in range(problem.num_cells):
            of_cell = now.loads[heaviest[c // num_ranks]] - now.loads[c]
            if of_cell > slack and not is_tried[c]:
                light, slack = c, of_cell
        evals += 0 if light < 0 else inside * (_length(now, light) + 1)
        if light < 0 or evals >= max_evals:
            break
        is_tried[light] = True
        goal = light
        for b in range(light, problem.num_buckets, problem.num_cells):
            if now.filled[b] < now.filled[goal]:
                goal = b
        value, i, j = _best_exchange(problem, keep_full, now, heavy, light, goal, slack)
        if value < now.loads[heavy]:
            source = now.bucket[i]
            if j != NOBODY:
                goal = now.bucket[j]
                _take(problem, now, j)
                _take(problem, now, i)
                _put(problem, now, j, source)
            else:
                _take(problem, now, i)
            _put(problem, now, i, goal)
            return True, evals
    return False, evals


@kernel
def _best_exchange(problem, keep_full, now, heavy, light, goal, slack):  # type: ignore[no-untyped-def]  # numba infers them
    """(larger of both loads afterwards, sample that leaves, sample that comes or nobody): the smallest."""
    weights, tokens, cap, has_limits = problem.weights, problem.tokens, problem.cap, len(problem.limits) > 0
    of_heavy, of_light = problem.pace[heavy % problem.num_ranks], problem.pace[light % problem.num_ranks]
    heavy_load, light_load = now.loads[heavy], now.loads[heavy] - slack
    best, best_i, best_j = heavy_load, NOBODY, NOBODY
    i = now.first[heavy]
    while i != NOBODY:
        source = now.bucket[i]
        is_last = now.counts[source] == 1
        j = now.first[light]
        while j != NOBODY:
            delta, longer = weights[i] - weights[j], tokens[i] - tokens[j]
            value = max(heavy_load - delta * of_heavy, light_load + delta * of_light)
            if has_limits:
                less = delta - _added_again(problem, now, source, -longer, problem.rerun[j] - problem.rerun[i])
                more = delta + _added_again(problem, now, now.bucket[j], longer, problem.rerun[i] - problem.rerun[j])
                value = max(heavy_load - less * of_heavy, light_load + more * of_light)
            if value < best and now.filled[source] - longer <= cap and now.filled[now.bucket[j]] + longer <= cap:
                best, best_i, best_j = value, i, j
            j = now.after[j]
        if now.filled[goal] + tokens[i] <= cap and not (keep_full and is_last):
            less = weights[i] + (problem.fixed if is_last else 0)
            more = weights[i] + (problem.fixed if now.counts[goal] == 0 else 0)
            if has_limits:
                less -= _added_again(problem, now, source, -tokens[i], -problem.rerun[i])
                more += _added_again(problem, now, goal, tokens[i], problem.rerun[i])
            value = max(heavy_load - less * of_heavy, light_load + more * of_light)
            if value < best:
                best, best_i, best_j = value, i, NOBODY
        i = now.after[i]
    return best, best_i, best_j


@kernel
def _kick(problem, now, heavy, random):  # type: ignore[no-untyped-def]  # numba infers them
    """Swaps random samples of the heavy cell with random others, where the cap allows it: the next random number."""
    num_samples, cells = len(now.bucket), problem.num_cells
    for _ in range(SWAPS_PER_KICK):
        inside = _length(now, heavy)
        if inside in (0, num_samples):
            return random
        random = (random * 1103515245 + 12345) & 0x7FFFFFFF
        i = now.first[heavy]
        for _ in range((random >> 8) % inside):
            i = now.after[i]
        random = (random * 1103515245 + 12345) & 0x7FFFFFFF
        j = (random >> 8) % num_samples
        while now.bucket[j] % cells == heavy:
            j = (j + 1) % num_samples
        a, b, longer = now.bucket[i], now.bucket[j], problem.tokens[i] - problem.tokens[j]
        if now.filled[a] - longer <= problem.cap and now.filled[b] + longer <= problem.cap:
            _take(problem, now, i)
            _take(problem, now, j)
            _put(problem, now, i, b)
            _put(problem, now, j, a)
    return random


@kernel
def _put(problem, now, i, b):  # type: ignore[no-untyped-def]  # numba infers them
    """Sample i, which is nowhere, into bucket b."""
    cell = b % problem.num_cells
    weight = problem.weights[i] + (problem.fixed if now.counts[b] == 0 else 0)
    weight += _added_again(problem, now, b, problem.tokens[i], problem.rerun[i])
    now.loads[cell] += weight * problem.pace[b % problem.num_ranks]
    now.filled[b] += problem.tokens[i]
    now.rerun[b] += problem.rerun[i]
    now.counts[b] += 1
    now.bucket[i] = b
    now.after[i], now.first[cell] = now.first[cell], i


@kernel
def _take(problem, now, i):  # type: ignore[no-untyped-def]  # numba infers them
    """Sample i out of its bucket."""
    b = now.bucket[i]
    cell = b % problem.num_cells
    now.counts[b] -= 1
    weight = problem.weights[i] + (problem.fixed if now.counts[b] == 0 else 0)
    weight -= _added_again(problem, now, b, -problem.tokens[i], -problem.rerun[i])
    now.filled[b] -= problem.tokens[i]
    now.rerun[b] -= problem.rerun[i]
    now.loads[cell] -= weight * problem.pace[b % problem.num_ranks]
    if now.first[cell] == i:
        now.first[cell] = now.after[i]
        return
    j = now.first[cell]
    while now.after[j] != i:
        j = now.after[j]
    now.after[j] = now.after[i]


@kernel
def _added_again(problem, now, b, num_tokens, rerun):  # type: ignore[no-untyped-def]  # numba infers them
    """Weight of layers that run again, with so many tokens more in a bucket and so much weight of a layer."""
    before = after = 0
    for limit in problem.limits:
        before += now.filled[b] > limit
        after += now.filled[b] + num_tokens > limit
    already = now.rerun[b] + problem.rerun_fixed
    return after * (already + rerun) - before * already


@kernel
def _length(now, cell):  # type: ignore[no-untyped-def]  # numba infers them
    length, i = 0, now.first[cell]
    while i != NOBODY:
        length, i = length + 1, now.after[i]
    return length
