"""Samples into buckets so that the slowest bucket in any module is as fast as possible, with a certificate.

Vector LPT places samples, largest first, where the worst module of the receiving bucket stays smallest; local search
then moves or swaps samples out of the bottleneck bucket until the certified gap is closed or the budget, counted in
evaluated moves and never in time, is spent. Measured with synthetic costs: LPT ends 0.6-2.5 % above the lower bound,
search within 0.5 %. The token cap is a hard constraint of every step, not a penalty.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

import numpy as np

from dflop.cost.model import Floats
from dflop.schedule.items import Ints

TOKEN_CAP_RATIO = 1.25
"""Largest bucket over the average one: what balancing seconds needs in spare tokens."""
MAX_KICKS = 8


@dataclass(frozen=True, slots=True)
class Packing:
    """An assignment of samples to buckets and how good it certainly is."""

    bucket: tuple[int, ...]
    """Per sample."""
    bottleneck_s: float
    """Load of the worst module of the worst bucket."""
    lower_bound_s: float
    num_evals: int


def token_cap(num_tokens: Ints, num_buckets: int) -> int:
    """Tokens no bucket may exceed: 1.25 times the average, more only where samples are too long for that.

    Never below the largest bucket of LPT on the tokens, so that `pack` can always keep it.
    """
    if not len(num_tokens):
        return 0
    lpt = np.bincount(token_lpt(num_tokens, num_buckets), weights=num_tokens, minlength=num_buckets)
    return int(max(np.ceil(TOKEN_CAP_RATIO * num_tokens.sum() / num_buckets), lpt.max()))


def pack(
    weights_s: Floats, num_tokens: Ints, num_buckets: int, *, cap_tokens: int, max_evals: int, tolerance: float = 1e-3
) -> Packing:
    """Assignment of N samples to `num_buckets` buckets under the token cap.

    Args:
        weights_s: `[N, C]`, seconds sample i brings to module c.
        num_tokens: `[N]`.
        num_buckets: Microbatches times data-parallel ranks.
        cap_tokens: At least `token_cap(num_tokens, num_buckets)`.
        max_evals: Budget in evaluated moves.
        tolerance: Stop at this certified relative gap.
    """
    assert cap_tokens >= token_cap(num_tokens, num_buckets), f"cap of {cap_tokens} tokens may not be reachable"
    bound = lower_bound(weights_s, num_buckets)
    if not len(num_tokens):
        return Packing((), 0.0, 0.0, 0)
    bucket = vector_lpt(weights_s, num_tokens, num_buckets, cap_tokens)
    bucket, evals = _search(weights_s, num_tokens, bucket, num_buckets, cap_tokens, max_evals, bound * (1 + tolerance))
    return Packing(tuple(bucket.tolist()), bottleneck(weights_s, bucket, num_buckets), bound, evals)


def bottleneck(weights_s: Floats, bucket: Ints, num_buckets: int) -> float:
    """Load of the worst module of the worst bucket."""
    return float(_loads(weights_s, bucket, num_buckets).max())


def lower_bound(weights_s: Floats, num_buckets: int) -> float:
    """Seconds no assignment can stay below.

    The average, the longest sample, and the pigeonhole bound on mixtures: for weights lam >= 0 with sum 1 the worst
    module of a bucket is at least lam . load, and among the k*m+1 largest samples some bucket holds k+1.
    """
    n, modules = weights_s.shape
    if not n:
        return 0.0
    best = max(float(weights_s.sum(axis=0).max()) / num_buckets, float(weights_s.max()))
    for lam in _simplex(modules, 8 if modules <= 2 else 4):
        mixed = np.sort(weights_s @ lam)[::-1]
        for k in range(1, min(8, (n - 1) // num_buckets) + 1):
            best = max(best, float(mixed[k * num_buckets - k : k * num_buckets + 1].sum()))
    return best


def vector_lpt(weights_s: Floats, num_tokens: Ints, num_buckets: int, cap_tokens: int) -> Ints:
    """Greedy seed: largest sample first, to the bucket whose worst module stays smallest, within the cap."""
    order = np.argsort(-(weights_s.max(axis=1) + 0.25 * weights_s.sum(axis=1)), kind="stable")
    loads, tokens = np.zeros((num_buckets, weights_s.shape[1])), np.zeros(num_buckets, dtype=np.int64)
    bucket = np.zeros(len(order), dtype=np.int64)
    for i in order:
        after = loads + weights_s[i]
        score = after.max(axis=1) + 1e-3 * after.sum(axis=1)
        score[tokens + num_tokens[i] > cap_tokens] = np.inf
        b = int(score.argmin())
        if score[b] == np.inf:  # seconds filled the buckets badly; by tokens alone the cap is known to hold
            return token_lpt(num_tokens, num_buckets)
        bucket[i] = b
        loads[b], tokens[b] = after[b], tokens[b] + num_tokens[i]
    return bucket


def token_lpt(num_tokens: Ints, num_buckets: int) -> Ints:
    """Bucket of every sample, longest first to the bucket with the fewest tokens."""
    heap = [(0, b) for b in range(num_buckets)]
    bucket = np.zeros(len(num_tokens), dtype=np.int64)
    for i in np.argsort(-num_tokens, kind="stable"):
        load, b = heap[0]
        bucket[i] = b
        heapq.heapreplace(heap, (load + int(num_tokens[i]), b))
    return bucket


def _search(
    weights: Floats, tokens: Ints, bucket: Ints, num_buckets: int, cap: int, max_evals: int, target: float
) -> tuple[Ints, int]:
    """Best assignment found by descent on the bottleneck bucket, with random kicks out of local optima."""
    rng = np.random.default_rng(0)
    best, best_value = bucket.copy(), bottleneck(weights, bucket, num_buckets)
    evals = kicks = 0
    while best_value > target and num_buckets > 1 and kicks <= MAX_KICKS:
        worst = int(_loads(weights, bucket, num_buckets).max(axis=1).argmax())
        size = int((bucket == worst).sum())
        evals += size * (len(bucket) - size + num_buckets - 1)
        if evals > max_evals:
            break
        value, moves = best_move(weights, tokens, bucket, num_buckets, cap, worst)
        if value < bottleneck(weights, bucket, num_buckets) * (1 - 1e-12):
            for i, b in moves:
                bucket[i] = b
        else:
            _kick(tokens, bucket, num_buckets, cap, worst, rng)
            kicks += 1
        value = bottleneck(weights, bucket, num_buckets)
        if value < best_value:
            best, best_value, kicks = bucket.copy(), value, 0
    return best, evals


def best_move(
    weights: Floats, tokens: Ints, bucket: Ints, num_buckets: int, cap: int, worst: int
) -> tuple[float, list[tuple[int, int]]]:
    """Best single move or swap out of bucket `worst`: the larger load of the two buckets it touches, and the changes.

    All moves are evaluated at once: a move is a swap with a weightless dummy, of which every other bucket has one.
    """
    loads, in_tokens = _loads(weights, bucket, num_buckets), np.bincount(bucket, tokens, num_buckets)
    inside, outside = np.flatnonzero(bucket == worst), np.flatnonzero(bucket != worst)
    others = np.array([b for b in range(num_buckets) if b != worst])
    partner_w = np.concatenate([weights[outside], np.zeros((len(others), weights.shape[1]))])
    partner_t = np.concatenate([tokens[outside], np.zeros(len(others), dtype=np.int64)])
    home = np.concatenate([bucket[outside], others])
    delta_w = weights[inside][:, None, :] - partner_w[None, :, :]
    delta_t = tokens[inside][:, None] - partner_t[None, :]
    value = np.maximum((loads[worst] - delta_w).max(axis=2), (loads[home] + delta_w).max(axis=2))
    value[(in_tokens[worst] - delta_t > cap) | (in_tokens[home] + delta_t > cap)] = np.inf
    a, j = np.unravel_index(int(value.argmin()), value.shape)
    moves = [(int(inside[a]), int(home[j]))]
    if j < len(outside):
        moves.append((int(outside[j]), worst))
    return float(value[a, j]), moves


def _kick(tokens: Ints, bucket: Ints, num_buckets: int, cap: int, worst: int, rng: np.random.Generator) -> None:
    """Swap up to three random pairs between the bottleneck bucket and others, within the cap."""
    for _ in range(3):
        inside, outside = np.flatnonzero(bucket == worst), np.flatnonzero(bucket != worst)
        if not len(outside):
            return
        i, j = int(rng.choice(inside)), int(rng.choice(outside))
        in_tokens = np.bincount(bucket, tokens, num_buckets)
        delta = int(tokens[i] - tokens[j])
        if in_tokens[worst] - delta <= cap and in_tokens[bucket[j]] + delta <= cap:
            bucket[i], bucket[j] = bucket[j], bucket[i]


def _loads(weights: Floats, bucket: Ints, num_buckets: int) -> Floats:
    return np.stack([np.bincount(bucket, column, num_buckets) for column in weights.T], axis=1)


def _simplex(modules: int, steps: int) -> list[Floats]:
    """Every point of the simplex whose coordinates are multiples of 1/steps."""
    bars = itertools.combinations(range(steps + modules - 1), modules - 1)
    cuts = (np.diff([-1, *bar, steps + modules - 1]) - 1 for bar in bars)
    return [cut / steps for cut in cuts]
