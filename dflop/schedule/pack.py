"""Samples into buckets so that the slowest bucket in any module is as fast as possible, with a certificate.

Vector LPT places samples, largest first, where the worst module of the receiving bucket stays smallest, in several
orders of size. Local search then lowers the worst bucket by swaps and moves, by dealing out two buckets anew, and by
random kicks, until the certified gap is closed or the budget, counted in evaluated moves and never in time, is spent.
Token caps are hard constraints of every step, not penalties.

The search is here as arrays and in `pack_kernel.py` compiled; both find the same assignment.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dflop.cost.model import Floats
from dflop.schedule.bound import lower_bound
from dflop.schedule.items import Ints
from dflop.schedule.pack_kernel import Instance, improve_kernel, token_lpt_kernel, vector_lpt_kernel
from dflop.schedule.pack_search import improve, vector_lpt_of
from dflop.simulate.jit import IS_COMPILED

TOKEN_CAP_RATIO = 1.25
"""Largest bucket over the average one: what balancing seconds needs in spare tokens."""


@dataclass(frozen=True, slots=True)
class Packing:
    """An assignment of samples to buckets and how good it certainly is."""

    bucket: tuple[int, ...]
    """Per sample."""
    bottleneck_s: float
    """Load of the worst module of the worst bucket."""
    lower_bound_s: float
    num_evals: int


def token_cap(num_tokens: Ints, num_buckets: int, *, compiled: bool = IS_COMPILED) -> int:
    """Tokens no bucket may exceed: 1.25 times the average, more only where samples are too long for that.

    Never below the largest bucket of LPT on the tokens, so that `pack` can always keep it.
    """
    if not len(num_tokens):
        return 0
    longest_first = -np.sort(-num_tokens)
    cap = max(int(np.ceil(TOKEN_CAP_RATIO * num_tokens.sum() / num_buckets)), int(longest_first[0]))
    # Under LPT the bucket a sample comes to had at most the average of what was placed before.
    before = np.cumsum(longest_first) - longest_first
    if (before / num_buckets + longest_first).max() <= cap:
        return cap
    lpt = token_lpt(longest_first, num_buckets, compiled=compiled)
    return max(cap, int(np.bincount(lpt, weights=longest_first, minlength=num_buckets).max()))


def pack(
    weights_s: Floats,
    num_tokens: Ints,
    num_buckets: int,
    *,
    cap_tokens: int | Sequence[int],
    max_evals: int,
    tolerance: float = 1e-3,
    compiled: bool = IS_COMPILED,
) -> Packing:
    """Assignment of N samples to `num_buckets` buckets under token caps.

    One cap that `token_cap` allows is always kept. Several caps at once (all modules of an inline plan) may admit no
    assignment at all: where neither seconds nor shares of the caps lead LPT to one that keeps them, the first cap is
    kept as if it were alone, and the search never lets a bucket that it touches exceed any.

    Args:
        weights_s: `[N, C]`, seconds sample i brings to module c; finite, not negative.
        num_tokens: `[N]`, or `[N, K]` where K kinds of tokens are capped.
        num_buckets: Microbatches times data-parallel ranks.
        cap_tokens: Per bucket, one or K; the first at least `token_cap(num_tokens, num_buckets)`.
        max_evals: Budget in evaluated moves.
        tolerance: Stop at this certified relative gap.
        compiled: False: the same assignment from numpy alone.

    Raises:
        ValueError: seconds that are negative or not finite.
    """
    if not len(weights_s):
        return Packing((), 0.0, 0.0, 0)
    if not np.isfinite(weights_s).all() or (weights_s < 0).any():
        raise ValueError("seconds must be finite and not negative")
    tokens = np.ascontiguousarray(num_tokens, dtype=np.int64).reshape(len(num_tokens), -1)
    caps = np.atleast_1d(np.asarray(cap_tokens, dtype=np.int64))
    assert tokens.shape[1] == len(caps), f"{tokens.shape[1]} kinds of tokens, {len(caps)} caps"
    assert caps[0] >= token_cap(tokens[:, 0], num_buckets, compiled=compiled), f"cap of {caps[0]} may not be reachable"
    bound = lower_bound(weights_s, num_buckets)
    ticks, tick_s = _in_ticks(weights_s)
    instance, target = Instance(ticks, tokens, caps), float(np.floor(bound * (1 + tolerance) / tick_s))
    bucket = _seed(instance, num_buckets, target, compiled)
    bucket, evals = (improve_kernel if compiled else improve)(instance, bucket, num_buckets, max_evals, target)
    return Packing(tuple(bucket.tolist()), bottleneck(weights_s, bucket, num_buckets), bound, evals)


def bottleneck(weights_s: Floats, bucket: Ints, num_buckets: int) -> float:
    """Load of the worst module of the worst bucket."""
    return max(float(np.bincount(bucket, column, num_buckets).max()) for column in weights_s.T)


def vector_lpt(
    weights_s: Floats, num_tokens: Ints, num_buckets: int, cap_tokens: int, *, compiled: bool = IS_COMPILED
) -> Ints:
    """Greedy assignment: largest sum of seconds first, to the bucket whose worst module stays smallest, within the cap.

    By tokens alone where seconds fill the buckets so badly that some sample finds no place.
    """
    ticks, _ = _in_ticks(weights_s)
    instance = Instance(ticks, num_tokens.astype(np.int64).reshape(-1, 1), np.array([cap_tokens], dtype=np.int64))
    found = _greedy(instance, next(_orders(ticks)), num_buckets, compiled)
    return token_lpt(num_tokens, num_buckets, compiled=compiled) if found is None else found


def token_lpt(num_tokens: Ints, num_buckets: int, *, compiled: bool = IS_COMPILED) -> Ints:
    """Bucket of every sample, longest first to the bucket with the fewest tokens."""
    order = np.argsort(-num_tokens, kind="stable")
    bucket: Ints
    if compiled:
        bucket = token_lpt_kernel(num_tokens, order, num_buckets)
        return bucket
    heap = [(0, b) for b in range(num_buckets)]
    bucket = np.zeros(len(num_tokens), dtype=np.int64)
    for i, tokens in zip(order.tolist(), num_tokens[order].tolist(), strict=True):
        load, b = heap[0]
        bucket[i] = b
        heapq.heapreplace(heap, (load + tokens, b))
    return bucket


def _in_ticks(weights_s: Floats) -> tuple[Floats, float]:
    """(weights as whole numbers, seconds of one): all sums of them, and small multiples of sums, are exact in floats.

    A tick is 2^-46 of all seconds or a little more: far below what any cost is known to.
    """
    _, exponent = np.frexp(weights_s.sum(axis=0).max(initial=0.0))
    tick_s = 2.0 ** (int(exponent) - 46)
    ticks: Floats = np.ascontiguousarray(np.rint(weights_s / tick_s))
    return ticks, tick_s


def _seed(instance: Instance, num_buckets: int, target: float, compiled: bool) -> Ints:
    """The best of vector LPT in several orders, the first one that meets the target; by tokens if caps forbid them."""
    best, best_height = None, np.inf
    for order in _orders(instance.weights):
        found = _greedy(instance, order, num_buckets, compiled)
        if found is not None and (height := bottleneck(instance.weights, found, num_buckets)) < best_height:
            best, best_height = found, height
        if best_height <= target:
            break
    if best is None and len(instance.caps) > 1:
        shares, _ = _in_ticks(instance.tokens / np.maximum(instance.caps, 1))
        best = _greedy(Instance(shares, instance.tokens, instance.caps), next(_orders(shares)), num_buckets, compiled)
    return token_lpt(instance.tokens[:, 0], num_buckets, compiled=compiled) if best is None else best


def _orders(weights: Floats) -> Iterator[Ints]:
    """Samples, largest first, by several ideas of large: all modules, the worst, each module in turn."""
    total = weights.sum(axis=1)
    yield np.argsort(-total, kind="stable")
    if weights.shape[1] > 1:
        yield np.argsort(-(weights.max(axis=1) + total / 4), kind="stable")
        for column in weights.T:
            yield np.argsort(-(64 * column + total), kind="stable")


def _greedy(instance: Instance, order: Ints, num_buckets: int, compiled: bool) -> Ints | None:
    bucket: Ints = (vector_lpt_kernel if compiled else vector_lpt_of)(instance, order, num_buckets)
    return None if len(bucket) and bucket[0] < 0 else bucket
