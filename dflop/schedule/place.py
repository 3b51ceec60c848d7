"""Samples into slots of chosen sizes: longest first, where the worst kind of stage stays relatively smallest.

The greedy behind ramp seeds and quick plans, and the split of a slot's media items over an encoder's ranks.
O(samples x buckets).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from dflop.cost.model import Floats
from dflop.schedule.items import Ints
from dflop.schedule.linear import LinearStep, Part
from dflop.schedule.state import Task, add, fits, make_state, make_task
from dflop.simulate.jit import kernel


def place(task: Task, sizes: Floats, order: Ints | None = None) -> Ints:
    """Bucket `slot * ranks + rank` of every sample.

    A sample that fits nowhere under the caps goes to the bucket with the fewest tokens.

    Args:
        task: The step.
        sizes: `[slots]` relative size that each slot shall have, above 0.
        order: Of samples; None: those with most seconds first.
    """
    num_chain, num_seconds = int(task.first[0]), int(task.first[1])
    weights = task.samples[:-1, :num_seconds].copy()
    weights[:, num_chain:] *= task.num_lanes
    if order is None:
        order = np.argsort(-(weights.max(axis=1, initial=0.0) + 0.25 * weights.sum(axis=1)), kind="stable")
    state = make_state(task, np.zeros(len(weights), dtype=np.int64))
    _place(task, state, order, sizes)
    return state.content_of


def by_shares(step: LinearStep) -> Iterator[Ints]:
    """Buckets of every sample where not seconds are balanced but shares of the caps, for both orders of samples.

    For a plan that must be made at once and keep what memory holds.
    """
    share_llm = step.tokens / max(1, min(step.cap_tokens, step.cap_in_flight_tokens // step.window))
    bound = np.flatnonzero(step.cap_media_tokens)
    share_media = step.media_tokens[bound] / step.cap_media_tokens[bound, None]
    on_chain = step.on_chain[bound]
    chain, encoders = [share_llm, *share_media[on_chain]], [*share_media[~on_chain]]
    num_samples = len(share_llm)
    of_caps = dataclasses.replace(
        step,
        chain_s=np.array(chain),
        chain_slowness=np.ones((len(chain), step.num_ranks)),
        slot_s=np.array(encoders).reshape(-1, num_samples),
        largest_s=np.zeros((len(encoders), num_samples)),
        stage_parts=tuple((Part(0, 0.0, 0.5),) for _ in step.stage_parts),
    )
    task, sizes = make_task(of_caps), np.ones(step.num_slots)
    shares = np.vstack([share_llm, *share_media])
    for size in (shares.max(axis=0), shares.sum(axis=0)):
        yield place(task, sizes, np.argsort(-size, kind="stable"))


def split_items(
    slot: Ints, weights: Floats, num_slots: int, num_ranks: int, slowness: Floats | None = None
) -> Ints:  # fmt: skip
    """Encoder rank of every item: within its slot, heaviest first to the rank that ends first.

    Within 4/3 of the best split over equal ranks. What all ranks would need for an item is left out of the comparison:
    then equal ranks compare nothing but loads.
    """
    rank = np.zeros(len(slot), dtype=np.int64)
    slow = np.ones(num_ranks) if slowness is None else slowness
    if num_ranks > 1:
        _split(slot, weights, np.argsort(-weights, kind="stable"), np.zeros((num_slots, num_ranks)), slow, rank)
    return rank


def split_under_cap(
    slot: Ints,
    seconds: Floats,
    num_tokens: Ints,
    num_slots: int,
    num_ranks: int,
    slowness: Floats | None = None,
    *,
    cap_tokens: int | None,
) -> Ints:
    """Encoder rank of every item, by seconds; by tokens in the slots in which that would break the cap on a rank's."""
    rank = split_items(slot, seconds, num_slots, num_ranks, slowness)
    if cap_tokens is None:
        return rank
    total = np.bincount(slot * num_ranks + rank, num_tokens, num_slots * num_ranks).reshape(num_slots, num_ranks)
    is_over = (total.max(axis=1) > cap_tokens)[slot]
    if is_over.any():
        by_tokens = split_items(slot, num_tokens.astype(float), num_slots, num_ranks)
        rank = np.where(is_over, by_tokens, rank)
    return rank


@kernel
def _split(slot, weights, order, loads, slowness, rank):  # type: ignore[no-untyped-def]  # numba infers them
    more = slowness - slowness.min()
    for i in order:
        mine = loads[slot[i]]
        best = 0
        for r in range(1, len(mine)):
            if mine[r] + weights[i] * more[r] < mine[best] + weights[i] * more[best]:
                best = r
        rank[i] = best
        mine[best] += weights[i] * slowness[best]


@kernel
def _place(task, state, order, sizes):  # type: ignore[no-untyped-def]  # numba infers them
    lanes, num_chain, num_seconds, samples = task.num_lanes, task.first[0], task.first[1], task.samples
    bucket_sum, slot_sum, slowness = state.bucket_sum, state.slot_sum, task.slowness
    fastest = np.array([slowness[q].min() for q in range(num_chain)])
    least = np.zeros((task.num_slots, num_chain))  # of a slot's buckets: no slot is looked into that cannot win
    largest = np.zeros((task.num_slots, num_seconds - num_chain))
    for i in order:
        best = -1
        for is_checked in (False, True):  # caps of all buckets only where the best of them breaks one
            best, best_score = -1, np.inf
            for k in range(task.num_slots):
                shared = bound = 0.0
                for q in range(num_chain, num_seconds):
                    own = max(largest[k, q - num_chain], task.largest_s[i, q - num_chain])
                    shared = max(shared, max(own, slot_sum[k, q] + samples[i, q]))
                for q in range(num_chain):
                    bound = max(bound, (least[k, q] + samples[i, q]) * fastest[q])
                if (max(shared, bound) + 1e-3 * (shared + bound)) / sizes[k] >= best_score:
                    continue
                for b in range(k * lanes, (k + 1) * lanes):
                    own = 0.0
                    for q in range(num_chain):
                        own = max(own, (bucket_sum[b, q] + samples[i, q]) * slowness[q, b - k * lanes])
                    score = (max(shared, own) + 1e-3 * (shared + own)) / sizes[k]
                    if score < best_score and (not is_checked or fits(task, state, b, i)):
                        best, best_score = b, score
            if not is_checked and fits(task, state, best, i):
                break
        if best < 0:
            best = int(np.argmin(bucket_sum[:, num_seconds + 1]))
        add(task, state, i, best)
        k = best // lanes
        for q in range(num_seconds - num_chain):
            largest[k, q] = max(largest[k, q], task.largest_s[i, q])
        for q in range(num_chain):
            least[k, q] = bucket_sum[k * lanes : (k + 1) * lanes, q].min()
