"""Samples into slots of chosen sizes: longest first, where the worst kind of stage stays relatively smallest.

The greedy behind ramp seeds and quick plans: O(samples x buckets) at worst, but blocks of buckets are passed over in
which even the emptiest could not win.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from dflop.cost.model import Floats
from dflop.schedule.items import Ints
from dflop.schedule.linear import LinearStep, Part
from dflop.schedule.rank_kernel import BLOCK
from dflop.schedule.state import Task, add, fits, make_state, make_task
from dflop.simulate.jit import kernel

SLOTS = 16
"""Consecutive slots that are passed over together."""


def place(task: Task, profiles: Iterable[Floats], order: Ints | None = None) -> Iterator[Ints]:
    """Per profile the bucket `slot * ranks + rank` of every sample.

    A sample that fits nowhere under the caps goes to the bucket with the fewest tokens.

    Args:
        task: The step.
        profiles: `[slots]` each, relative size that each slot shall have, above 0.
        order: Of samples; None: those with most seconds first.
    """
    num_chain, num_seconds = int(task.first[0]), int(task.first[1])
    weights = task.samples[:-1, :num_seconds].copy()
    weights[:, num_chain:] *= task.num_lanes
    if order is None:
        order = np.argsort(-(weights.max(axis=1, initial=0.0) + 0.25 * weights.sum(axis=1)), kind="stable")
    leading = _leading(weights[:, :num_chain], task.slowness)
    for sizes in profiles:
        state = make_state(task, np.zeros(len(weights), dtype=np.int64))
        _place(task, state, order, sizes, leading)
        yield state.content_of


def _leading(seconds: Floats, slowness: Floats) -> Ints:
    """Columns of `[samples, Q]` seconds that decide: no other is as large in every sample and on every rank."""
    kept: list[int] = []
    for q in np.argsort(-seconds.sum(axis=0), kind="stable").tolist():
        if not any((seconds[:, p] >= seconds[:, q]).all() and (slowness[p] >= slowness[q]).all() for p in kept):
            kept.append(q)
    return np.array(kept, dtype=np.int64)


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
        yield from place(task, [sizes], np.argsort(-size, kind="stable"))


@kernel
def _place(task, state, order, sizes, chain):  # type: ignore[no-untyped-def]  # numba infers them
    lanes, num_chain, num_seconds, samples = task.num_lanes, task.first[0], task.first[1], task.samples
    bucket_sum, slot_sum, slowness = state.bucket_sum, state.slot_sum, task.slowness
    fastest = np.array([slowness[q].min() for q in range(num_chain)])
    num_blocks = (lanes + BLOCK - 1) // BLOCK
    least = np.zeros((task.num_slots, num_blocks, num_chain))  # of a block's buckets
    load = np.zeros((task.num_slots, num_blocks))  # of a block's emptiest bucket
    largest = np.zeros((task.num_slots, num_seconds - num_chain))
    lowest = np.zeros(((task.num_slots + SLOTS - 1) // SLOTS, num_chain))  # of buckets of several slots
    widest = np.array([sizes[k : k + SLOTS].max() for k in range(0, task.num_slots, SLOTS)])
    for i in order:
        first, best = divmod(np.argmin(load), num_blocks), -1
        for is_checked in (False, True):  # caps of all buckets only where the best of them breaks one
            best, best_score = -1, np.inf
            turn = -1
            while turn < task.num_slots:
                k, begin, end = (first[0], first[1], first[1] + 1) if turn < 0 else (turn, 0, num_blocks)
                if turn == 0:  # what the emptiest has found passes most others over; of equals the first wins
                    best_score = np.nextafter(best_score, np.inf)
                if turn >= 0 and turn % SLOTS == 0:
                    bound = 0.0
                    for q in chain:
                        bound = max(bound, (lowest[k // SLOTS, q] + samples[i, q]) * fastest[q])
                    if (bound + 1e-3 * bound) / widest[k // SLOTS] >= best_score:
                        turn += SLOTS
                        continue
                turn += 1
                shared = 0.0
                for q in range(num_chain, num_seconds):
                    own = max(largest[k, q - num_chain], task.largest_s[i, q - num_chain])
                    shared = max(shared, max(own, slot_sum[k, q] + samples[i, q]))
                for block in range(begin, end):
                    bound = 0.0
                    for q in chain:
                        bound = max(bound, (least[k, block, q] + samples[i, q]) * fastest[q])
                    if (max(shared, bound) + 1e-3 * (shared + bound)) / sizes[k] >= best_score:
                        continue
                    for r in range(block * BLOCK, min((block + 1) * BLOCK, lanes)):
                        own, b = 0.0, k * lanes + r
                        for q in chain:
                            own = max(own, (bucket_sum[b, q] + samples[i, q]) * slowness[q, r])
                        score = (max(shared, own) + 1e-3 * (shared + own)) / sizes[k]
                        if score < best_score and (not is_checked or fits(task, state, b, i)):
                            best, best_score = b, score
            if not is_checked and fits(task, state, best, i):
                break
        if best < 0:
            best = int(np.argmin(bucket_sum[:, num_seconds + 1]))
        add(task, state, i, best)
        k, block = best // lanes, best % lanes // BLOCK
        for q in range(num_seconds - num_chain):
            largest[k, q] = max(largest[k, q], task.largest_s[i, q])
        for q in chain:
            least[k, block, q] = np.inf
            for b in range(k * lanes + block * BLOCK, k * lanes + min((block + 1) * BLOCK, lanes)):
                least[k, block, q] = min(least[k, block, q], bucket_sum[b, q])
            own = k // SLOTS * SLOTS
            lowest[k // SLOTS, q] = least[own : own + SLOTS, :, q].min()
        load[k, block] = (least[k, block] * fastest).max() / sizes[k]
