"""Samples over data-parallel ranks, step by step in numpy: `rank_kernel.py` and `tournament.py` do the same compiled.

Bucket `slot * num_ranks + rank` is one microbatch of one rank. Ranks wait for one another either once per step or in
every slot, and one pair of words covers both: a *cell* is what is summed up before anyone waits (a rank's whole step,
or one bucket), a *group* is the cells that wait for one another (all ranks, or a slot). A bucket `b` is part of cell
`b % num_cells`, a cell `c` of group `c // num_ranks`, and a step lasts the sum over groups of their heaviest cells.
Both are of rank `% num_ranks`; what a rank holds weighs `pace` times as much, so that a slow one is given less.

All numbers are integers, so that additions in another order, another machine or another compiler change nothing:
ranks that plan for themselves must come to the same plan to the last sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflop.schedule import rank_kernel, tournament

Ints = npt.NDArray[np.int64]

MAX_KICKS = 8
"""Random disturbances in a row that led to nothing before the search gives up."""
SWAPS_PER_KICK = 3
MAX_PARTNERS = 64
"""Cells with most slack that are tried, one after the other, for the heaviest one."""


@dataclass(frozen=True, slots=True)
class RankProblem:
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
    compiled: bool

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
        return loads * np.tile(self.pace, self.num_cells // self.num_ranks)

    def step(self, bucket: Ints) -> int:
        """Sum over groups of the heaviest cell: what the search makes small."""
        return int(self.loads(bucket).reshape(-1, self.num_ranks).max(axis=1).sum())


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
    order = np.argsort(-weights, kind="stable")
    if problem.compiled:
        found: Ints = tournament.greedy(
            order, weights, problem.tokens, pace, num_cells, problem.num_buckets, problem.cap
        )
        return found if found[order[-1]] >= 0 else None
    bucket = np.zeros(len(order), dtype=np.int64)
    loads, tokens = np.zeros(num_cells, dtype=np.int64), np.zeros(problem.num_buckets, dtype=np.int64)
    pace_of_cell = np.tile(pace, num_cells // problem.num_ranks)
    for i in order:
        emptiest = tokens.reshape(-1, num_cells).argmin(axis=0) * num_cells + np.arange(num_cells)
        has_room = tokens[emptiest] + problem.tokens[i] <= problem.cap
        if not has_room.any():
            return None
        after = loads + weights[i] * pace_of_cell
        cell = int(np.where(has_room, after, np.iinfo(np.int64).max).argmin())
        bucket[i] = emptiest[cell]
        loads[cell] = after[cell]
        tokens[bucket[i]] += problem.tokens[i]
    return bucket


def first_fit(tokens: Ints, cap: int, *, compiled: bool) -> Ints:
    """Bins of at most `cap` tokens, longest sample first into the first one with room: bin of every sample."""
    order = np.argsort(-tokens, kind="stable")
    if compiled:
        packed: Ints = tournament.first_fit(order, tokens, cap)
        return packed
    room = np.full(len(tokens), cap, dtype=np.int64)
    bins = np.zeros(len(tokens), dtype=np.int64)
    for i in order:
        bins[i] = (room >= tokens[i]).argmax()
        room[bins[i]] -= tokens[i]
    return bins


def search(problem: RankProblem, bucket: Ints, target: int, max_evals: int) -> Ints:
    """Best assignment found by moving and swapping samples out of the heaviest cells.

    Args:
        problem: What to place.
        bucket: `[samples]`, an assignment within the cap; not changed.
        target: Good enough: stops here.
        max_evals: Moves and swaps looked at.
    """
    if problem.compiled:
        found: Ints = rank_kernel.search(
            bucket, problem.weights, problem.tokens, problem.pace, problem.num_cells, problem.num_buckets,
            problem.cap, problem.fixed, problem.keep_full, target, max_evals, MAX_KICKS, SWAPS_PER_KICK,
            MAX_PARTNERS,
        )  # fmt: skip
        return found
    return _Search(problem, bucket, target, max_evals).run()


class _Search:
    """The reference: everything is computed anew for every move."""

    def __init__(self, problem: RankProblem, bucket: Ints, target: int, max_evals: int) -> None:
        self._problem, self._bucket = problem, bucket.copy()
        self._target, self._evals_left = target, max_evals
        self._random = 1

    def run(self) -> Ints:
        best, best_step, kicks = self._bucket.copy(), self._problem.step(self._bucket), 0
        is_stuck, has_changed = np.zeros(self._problem.num_cells // self._problem.num_ranks, dtype=bool), False
        while best_step > self._target and kicks <= MAX_KICKS:
            idle = self._idle()
            if is_stuck.all():
                if not has_changed:
                    self._kick(int(idle.argmax()))
                    kicks += 1
                has_changed, is_stuck[:] = False, False
            else:
                group = int(np.where(is_stuck, -1, idle).argmax())
                is_stuck[group] = not self._improve(group)
                has_changed |= not is_stuck[group]
                if self._evals_left < 0:
                    break
            step = self._problem.step(self._bucket)
            if step < best_step:
                best, best_step, kicks = self._bucket.copy(), step, 0
        return best

    def _idle(self) -> Ints:
        """`[groups]` weight by which the cells of a group stay below its heaviest one, summed."""
        loads = self._problem.loads(self._bucket).reshape(-1, self._problem.num_ranks)
        idle: Ints = loads.max(axis=1) * self._problem.num_ranks - loads.sum(axis=1)
        return idle

    def _heaviest(self, group: int) -> int:
        ranks = self._problem.num_ranks
        return group * ranks + int(self._problem.loads(self._bucket)[group * ranks : (group + 1) * ranks].argmax())

    def _improve(self, group: int) -> bool:
        """Relieve the heaviest cell of a group in favour of the cell with most slack that can take something."""
        p = self._problem
        heavy, loads = self._heaviest(group), p.loads(self._bucket)
        heaviest = np.repeat(loads.reshape(-1, p.num_ranks).max(axis=1), p.num_ranks)
        slack = heaviest - loads
        cell = self._bucket % p.num_cells
        inside = np.flatnonzero(cell == heavy)
        if not len(inside):
            return False
        for light in np.argsort(-slack, kind="stable")[:MAX_PARTNERS]:
            if slack[light] <= 0:
                return False
            outside = np.flatnonzero(cell == light)
            self._evals_left -= len(inside) * (len(outside) + 1)
            if self._evals_left < 0:
                return False
            value, i, j = self._best_exchange(inside, outside, heavy, int(light), int(loads[heavy]), int(slack[light]))
            if value < loads[heavy]:
                self._exchange(i, j, int(light))
                return True
        return False

    def _best_exchange(
        self, inside: Ints, outside: Ints, heavy: int, light: int, heavy_load: int, slack: int
    ) -> tuple[int, int, int]:
        """(larger of the two loads afterwards, sample that leaves, sample that comes or -1): the smallest value.

        The light cell is seen as if its group were as heavy as the heavy cell's: only slack counts.
        """
        p = self._problem
        counts = np.bincount(self._bucket, minlength=p.num_buckets)
        tokens = np.bincount(self._bucket, p.tokens, p.num_buckets).astype(np.int64)
        goal = self._emptiest(light)
        home = np.append(self._bucket[outside], goal)
        weight, length = np.append(p.weights[outside], 0), np.append(p.tokens[outside], 0)
        delta = p.weights[inside][:, None] - weight[None, :]
        longer = p.tokens[inside][:, None] - length[None, :]
        source = self._bucket[inside]
        of_heavy, of_light = p.pace[heavy % p.num_ranks], p.pace[light % p.num_ranks]
        heavy_after, light_after = heavy_load - delta * of_heavy, heavy_load - slack + delta * of_light
        heavy_after[:, -1] -= np.where(counts[source] == 1, p.fixed * of_heavy, 0)
        light_after[:, -1] += p.fixed * of_light if counts[goal] == 0 else 0
        value = np.maximum(heavy_after, light_after)
        is_over = (tokens[home][None, :] + longer > p.cap) | (tokens[source][:, None] - longer > p.cap)
        if p.keep_full:
            is_over[:, -1] |= counts[source] == 1
        value[is_over] = np.iinfo(np.int64).max
        row, column = np.unravel_index(int(value.argmin()), value.shape)
        return (
            int(value[row, column]),
            int(inside[row]),
            int(outside[column]) if column < len(outside) else -1,
        )

    def _emptiest(self, cell: int) -> int:
        p = self._problem
        tokens = np.bincount(self._bucket, p.tokens, p.num_buckets)
        return int(tokens[cell :: p.num_cells].argmin()) * p.num_cells + cell

    def _exchange(self, i: int, j: int, light: int) -> None:
        goal = int(self._bucket[j]) if j >= 0 else self._emptiest(light)
        if j >= 0:
            self._bucket[j] = self._bucket[i]
        self._bucket[i] = goal

    def _kick(self, group: int) -> None:
        """Swap random samples of the heaviest cell with random others, where the cap allows it."""
        p, heavy = self._problem, self._heaviest(group)
        for _ in range(SWAPS_PER_KICK):
            is_inside = self._bucket % p.num_cells == heavy
            i, j = self._draw(is_inside), self._draw(~is_inside)
            if i < 0 or j < 0:
                return
            tokens = np.bincount(self._bucket, p.tokens, p.num_buckets).astype(np.int64)
            longer = p.tokens[i] - p.tokens[j]
            if tokens[self._bucket[i]] - longer <= p.cap and tokens[self._bucket[j]] + longer <= p.cap:
                self._bucket[i], self._bucket[j] = self._bucket[j], self._bucket[i]

    def _draw(self, is_wanted: npt.NDArray[np.bool_]) -> int:
        """The first wanted sample from a random one on; -1 when there is none."""
        self._random = (self._random * 1103515245 + 12345) % 2**31
        start = self._random % len(is_wanted)
        wanted = np.flatnonzero(np.roll(is_wanted, -start))
        return int(wanted[0] + start) % len(is_wanted) if len(wanted) else -1
