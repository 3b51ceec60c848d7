"""The search of `pack.py` as arrays: what `pack_kernel.py` is held equal to, and what runs where nothing is compiled.

Weights are whole numbers (`pack._in_ticks`), so that sums do not depend on their order.
"""

from __future__ import annotations

import numpy as np

from dflop.cost.model import Floats
from dflop.schedule.items import Ints
from dflop.schedule.pack_kernel import DEAL_EVALS, KICK_SWAPS, MAX_DEALT, MAX_KICKS, NOWHERE, Instance


def vector_lpt_of(instance: Instance, order: Ints, num_buckets: int) -> Ints:
    """Bucket of every sample; the first is `NOWHERE` when some sample has no place under the caps."""
    weights, tokens, caps = instance
    loads = np.zeros((num_buckets, weights.shape[1]))
    filled = np.zeros((num_buckets, len(caps)), dtype=np.int64)
    bucket = np.zeros(len(order), dtype=np.int64)
    for i in order:
        after = loads + weights[i]
        score = after.max(axis=1) + after.sum(axis=1) / 1024
        score[(filled + tokens[i] > caps).any(axis=1)] = np.inf
        b = int(score.argmin())
        if score[b] == np.inf:
            bucket[0] = NOWHERE
            return bucket
        bucket[i] = b
        loads[b], filled[b] = after[b], filled[b] + tokens[i]
    return bucket


def improve(instance: Instance, bucket: Ints, num_buckets: int, max_evals: int, target: float) -> tuple[Ints, int]:
    """(best assignment found from `bucket` on, evaluated moves); stops at a height of `target`."""
    search = _Search(instance, bucket.copy(), num_buckets, max_evals)
    best, best_height, kicks = bucket.copy(), search.heights.max(), 0
    while True:
        search.descend(target)
        height = search.heights.max()
        if height < best_height:
            best, best_height, kicks = search.bucket.copy(), height, 0
        if best_height <= target or search.evals >= max_evals or kicks == MAX_KICKS or num_buckets == 1:
            return best, search.evals
        if height > best_height:
            search.bucket = best.copy()
        search.kick()
        kicks += 1


class _Search:
    """An assignment on its way to a lower worst bucket."""

    def __init__(self, instance: Instance, bucket: Ints, num_buckets: int, max_evals: int) -> None:
        self.weights, self.tokens, self.caps = instance
        self.bucket, self.num_buckets, self.max_evals = bucket, num_buckets, max_evals
        self.evals, self.random_state = 0, 1

    @property
    def loads(self) -> Floats:
        """`[buckets, C]`."""
        return np.stack([np.bincount(self.bucket, column, self.num_buckets) for column in self.weights.T], axis=1)

    @property
    def heights(self) -> Floats:
        """`[buckets]` load of the worst module."""
        heights: Floats = self.loads.max(axis=1)
        return heights

    def descend(self, target: float) -> None:
        """Lowers the worst bucket with the first other one that can, until none can or the budget is spent.

        By the best swap or move of one sample as long as there is one, then by dealing out the samples of both anew.
        """
        failures = 0
        while failures < 2:
            heights = self.heights
            worst = int(heights.argmax())
            if heights[worst] <= target:
                return
            start, is_lower = self._random(), False
            for other in (start + np.arange(self.num_buckets)) % self.num_buckets:
                if other == worst or is_lower:
                    continue
                inside, outside = np.flatnonzero(self.bucket == worst), np.flatnonzero(self.bucket == other)
                size = len(inside) + len(outside)
                if failures == 0:
                    self.evals += len(inside) * (len(outside) + 1)
                elif size <= MAX_DEALT:
                    self.evals += DEAL_EVALS * size
                else:
                    continue
                if self.evals >= self.max_evals:
                    self.evals = self.max_evals
                    return
                lower = self._swap if failures == 0 else self._deal
                is_lower = lower(inside, outside, int(worst), int(other), heights[worst])
            failures = 0 if is_lower else failures + 1

    def kick(self) -> None:
        """Random swaps between the worst bucket and others, where the caps allow them."""
        worst = int(self.heights.argmax())
        for _ in range(KICK_SWAPS):
            inside = np.flatnonzero(self.bucket == worst)
            j = self._random() % len(self.bucket)
            i = int(inside[self._random() % len(inside)])
            other, more = self.bucket[j], self.tokens[i] - self.tokens[j]
            filled = [self.tokens[self.bucket == b].sum(axis=0) for b in (worst, other)]
            if other != worst and (filled[0] - more <= self.caps).all() and (filled[1] + more <= self.caps).all():
                self.bucket[i], self.bucket[j] = other, worst

    def _swap(self, inside: Ints, outside: Ints, worst: int, other: int, height: float) -> bool:
        """Makes the swap that leaves the higher bucket of both lowest, if it is lower; a move swaps with nothing."""
        partner_w = np.concatenate([self.weights[outside], np.zeros((1, self.weights.shape[1]))])
        partner_t = np.concatenate([self.tokens[outside], np.zeros((1, len(self.caps)), dtype=np.int64)])
        more = self.weights[inside][:, None] - partner_w[None]
        mine, theirs = self.weights[inside].sum(axis=0), self.weights[outside].sum(axis=0)
        value = np.maximum(mine - more, theirs + more).max(axis=2)
        more_t = self.tokens[inside][:, None] - partner_t[None]
        too_full = self.tokens[inside].sum(axis=0) - more_t > self.caps
        too_full |= self.tokens[outside].sum(axis=0) + more_t > self.caps
        value[too_full.any(axis=2)] = np.inf
        a, b = np.unravel_index(int(value.argmin()), value.shape)
        if value[a, b] >= height:
            return False
        self.bucket[inside[a]] = other
        if b < len(outside):
            self.bucket[outside[b]] = worst
        return True

    def _deal(self, inside: Ints, outside: Ints, worst: int, other: int, height: float) -> bool:
        """Deals two buckets out anew, by `vector_lpt` in a random order; kept if it lowers the higher one.

        The order is by a random mixture of modules, descending.
        """
        members = np.concatenate([inside, outside])
        factors = [self._random() % 16 + 1 for _ in range(self.weights.shape[1])]
        order = np.argsort(-(self.weights[members] @ np.array(factors, dtype=float)), kind="stable")
        part = Instance(self.weights[members], self.tokens[members], self.caps)
        side = vector_lpt_of(part, order, 2)
        if side[0] == NOWHERE:
            return False
        loads = [part.weights[side == s].sum(axis=0).max(initial=0.0) for s in range(2)]
        if max(loads) >= height:
            return False
        self.bucket[members] = np.where(side == 0, worst, other)
        return True

    def _random(self) -> int:
        """Linear congruential generator modulo 2^31: its upper 23 bits."""
        self.random_state = (self.random_state * 1103515245 + 12345) & 0x7FFFFFFF
        return self.random_state >> 8
