"""Search on the simulator itself: assignment and order of microbatches that end the step soonest.

Balance alone leaves the pipeline's fill and drain to chance. Seeds are placed into slots that grow at the start of the
step and shrink towards its end (`ramp_profiles`); simulated annealing then swaps and moves samples, slots and buckets.
Encoders count as one rank each here. The token cap holds after every move. Same step, same budget, same result, on any
machine: budgets count simulations, never time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np

from dflop.cost.model import Floats
from dflop.schedule.items import Ints
from dflop.schedule.linear import LinearStep
from dflop.schedule.place import _place
from dflop.simulate.jit import kernel
from dflop.simulate.kernel import _run

START_TEMPERATURE = 3e-4
"""Relative to the makespan; falls to 0 linearly."""
SWAP_SAMPLES, MOVE_SAMPLE, SWAP_SLOTS = 0.5, 0.75, 0.85
"""Cumulative shares of the moves; the rest swaps buckets."""


@functools.lru_cache(maxsize=64)
def ramp_profiles(num_slots: int, depth: int, most: int) -> Floats:
    """`[profiles, slots]` relative sizes: the flat one first, then ramps.

    A ramp is `min(1, up, down)`: up over the first h slots from `al`, down to it over the last t. When there are more
    than `most`, they are spread over the whole family.

    Args:
        num_slots: Microbatches.
        depth: Stages from the first encoder stage to the loss.
        most: Profiles wanted.
    """
    s = np.arange(num_slots, dtype=float)
    found: dict[bytes, Floats] = {}
    lengths = (max(2, depth // 2), max(1, depth - 1), depth + 1)
    for al, h, t in itertools.product((0.05, 0.2, 0.4, 0.7), (1, *lengths), (0, 1, *lengths)):
        up = al + (1 - al) * s / h
        down = al + (1 - al) * (num_slots - 1 - s) / t if t else np.ones(num_slots)
        profile = np.minimum(1.0, np.minimum(up, down))
        found.setdefault(profile.tobytes(), profile)
    ramps = list(found.values())
    picked: Sequence[int] = (
        np.unique(np.linspace(0, len(ramps) - 1, min(most - 1, len(ramps))).astype(int)).tolist() if most > 1 else []
    )
    return np.array([np.ones(num_slots), *(ramps[i] for i in picked)])


def search(
    step: LinearStep, seeds: list[Ints], *, num_profiles: int, num_simulations: int, random_seed: int = 0
) -> Ints:
    """Bucket `slot * ranks + rank` of every sample: the best found.

    Args:
        step: The step.
        seeds: Assignments to start from, beside the ramps; those over the cap are left out.
        num_profiles: Ramps to try.
        num_simulations: Budget of the annealing.
        random_seed: Of its moves.
    """
    starts, depth = list(seeds), int(step.num_after.max(initial=0)) + 1
    starts += [
        _place(step.chain_s, step.slot_s, step.tokens, sizes, step.num_ranks, step.cap_tokens)
        for sizes in ramp_profiles(step.num_slots, depth, num_profiles)
    ]
    arguments = _arguments(step)
    values = [_score(bucket, *arguments) for bucket in starts]
    best = starts[int(np.argmin(values))]
    if num_simulations < 1 or min(values) == np.inf:
        return best
    found: Ints = _anneal(best, num_simulations, np.random.default_rng(random_seed), *arguments)
    return found


def _arguments(step: LinearStep) -> tuple[object, ...]:
    """What the kernels take: the step, and its nodes (encoders with one rank each, then the chain's)."""
    num_pipes = len(step.pipe_pp)
    dp = np.ones(num_pipes, dtype=np.int64)
    dp[-1] = step.num_ranks
    sizes = step.pipe_pp * dp
    first_stage = np.concatenate([[0], np.cumsum(step.pipe_pp)[:-1]])
    nodes = np.array(
        [(p, s, r, first_stage[p] + s) for p in range(num_pipes) for s in range(step.pipe_pp[p]) for r in range(dp[p])],
        dtype=np.int64,
    )
    links = np.arange(num_pipes, dtype=np.int64) * step.num_slots * step.num_ranks
    return (
        step.num_slots, step.num_ranks, step.chain_s, step.slot_s, step.tokens, step.num_items, step.cap_tokens,
        step.pipe_pp, dp, np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64), links,
        nodes[:, 0].copy(), nodes[:, 1].copy(), nodes[:, 2].copy(), step.num_after[nodes[:, 3]],
        step.stage_kind[nodes[:, 3]], step.fixed_s[nodes[:, 3]], step.forward_frac[nodes[:, 3]],
    )  # fmt: skip


@kernel
def _refresh(  # type: ignore[no-untyped-def]  # numba infers them
    k, bucket, num_ranks, chain_s, slot_s, tokens, num_items, links, node_pipe, node_rank, kind, fixed_s, frac,
    num_pipes, active, forward, backward, feeds, in_bucket,
):  # fmt: skip
    """Everything about slot k from its samples, anew: nothing drifts."""
    chain = np.zeros((chain_s.shape[0], num_ranks))
    slot = np.zeros(slot_s.shape[0])
    items = np.zeros((num_pipes - 1, num_ranks), np.int64)
    count = np.zeros(num_ranks, np.int64)
    in_bucket[k, :] = 0
    for i in range(len(bucket)):
        if bucket[i] // num_ranks != k:
            continue
        r = bucket[i] % num_ranks
        count[r] += 1
        in_bucket[k, r] += tokens[i]
        for q in range(chain_s.shape[0]):
            chain[q, r] += chain_s[q, i]
        for q in range(slot_s.shape[0]):
            slot[q] += slot_s[q, i]
        for e in range(num_pipes - 1):
            items[e, r] += num_items[e, i]
    for e in range(num_pipes - 1):
        for r in range(num_ranks):
            feeds[links[e] + k * num_ranks + r] = items[e, r] > 0
    for n in range(len(node_pipe)):
        pipe, r = node_pipe[n], node_rank[n]
        if pipe == num_pipes - 1:
            active[n, k], seconds = count[r] > 0, chain[kind[n], r]
        else:
            active[n, k], seconds = items[pipe].sum() > 0, slot[kind[n]]
        forward[n, k] = frac[n] * (seconds + fixed_s[n])
        backward[n, k] = (1 - frac[n]) * (seconds + fixed_s[n])


@kernel
def _score(  # type: ignore[no-untyped-def]  # numba infers them
    bucket, num_slots, num_ranks, chain_s, slot_s, tokens, num_items, cap, pp, dp, start, links, node_pipe, node_stage,
    node_rank, after, kind, fixed_s, frac,
):  # fmt: skip
    """Makespan of an assignment; infinite over the cap."""
    num_nodes, num_pipes = len(node_pipe), len(pp)
    active, feeds = np.zeros((num_nodes, num_slots), np.bool_), np.zeros(links[-1], np.bool_)
    forward, backward = np.zeros((num_nodes, num_slots)), np.zeros((num_nodes, num_slots))
    none, in_bucket = np.zeros((num_nodes, num_slots)), np.zeros((num_slots, num_ranks), np.int64)
    for k in range(num_slots):
        _refresh(
            k, bucket, num_ranks, chain_s, slot_s, tokens, num_items, links, node_pipe, node_rank, kind, fixed_s, frac,
            num_pipes, active, forward, backward, feeds, in_bucket,
        )  # fmt: skip
    if in_bucket.max() > cap:
        return np.inf
    _, end = _run(
        num_slots, pp, dp, start, links, node_pipe, node_stage, node_rank, after, active, forward, backward, none, none,
        feeds,
    )  # fmt: skip
    return end.max()


@kernel
def _anneal(  # type: ignore[no-untyped-def]  # numba infers them
    first, num_simulations, rng, num_slots, num_ranks, chain_s, slot_s, tokens, num_items, cap, pp, dp, start,
    links, node_pipe, node_stage, node_rank, after, kind, fixed_s, frac,
):  # fmt: skip
    num_nodes, num_pipes, num_samples = len(node_pipe), len(pp), len(first)
    num_buckets = num_slots * num_ranks
    bucket, best = first.copy(), first.copy()
    active, feeds = np.zeros((num_nodes, num_slots), np.bool_), np.zeros(links[-1], np.bool_)
    forward, backward = np.zeros((num_nodes, num_slots)), np.zeros((num_nodes, num_slots))
    none, in_bucket = np.zeros((num_nodes, num_slots)), np.zeros((num_slots, num_ranks), np.int64)
    touched = np.arange(num_slots)
    num_touched, value, best_value = num_slots, -1.0, np.inf
    a = b = i = j = move = 0
    for round in range(num_simulations + 1):
        if round:  # the first round scores the start
            draw = rng.random()
            i, j = int(rng.random() * num_samples), int(rng.random() * num_samples)
            if draw < SWAP_SAMPLES:
                move, a, b = 0, bucket[i], bucket[j]
            elif draw < MOVE_SAMPLE:
                move, a, b = 1, bucket[i], int(rng.random() * num_buckets)
            elif draw < SWAP_SLOTS:
                move, a, b = 2, int(rng.random() * num_slots), int(rng.random() * num_slots)
            else:
                move, a, b = 3, int(rng.random() * num_buckets), int(rng.random() * num_buckets)
            if a == b:
                continue
            if move == 0 and (
                in_bucket[b // num_ranks, b % num_ranks] + tokens[i] - tokens[j] > cap
                or in_bucket[a // num_ranks, a % num_ranks] + tokens[j] - tokens[i] > cap
            ):
                continue
            if move == 1 and in_bucket[b // num_ranks, b % num_ranks] + tokens[i] > cap:
                continue
            _apply(bucket, move, i, j, a, b, num_ranks)
            touched[0] = a if move == 2 else a // num_ranks
            touched[1 % num_slots] = b if move == 2 else b // num_ranks
            num_touched = min(2, num_slots)
        for t in range(num_touched):
            _refresh(
                touched[t], bucket, num_ranks, chain_s, slot_s, tokens, num_items, links, node_pipe, node_rank, kind,
                fixed_s, frac, num_pipes, active, forward, backward, feeds, in_bucket,
            )  # fmt: skip
        _, end = _run(
            num_slots, pp, dp, start, links, node_pipe, node_stage, node_rank, after, active, forward, backward, none,
            none, feeds,
        )  # fmt: skip
        new = end.max()
        temperature = START_TEMPERATURE * max(value, 0.0) * (1.0 - round / (num_simulations + 1))
        if value < 0 or new <= value or rng.random() < np.exp((value - new) / max(temperature, 1e-300)):
            value = new
            if new < best_value:
                best_value = new
                best[:] = bucket
            continue
        _apply(bucket, move, j if move == 0 else i, i if move == 0 else j, a, b, num_ranks)
        if move == 1:
            bucket[i] = a
        for t in range(num_touched):
            _refresh(
                touched[t], bucket, num_ranks, chain_s, slot_s, tokens, num_items, links, node_pipe, node_rank, kind,
                fixed_s, frac, num_pipes, active, forward, backward, feeds, in_bucket,
            )  # fmt: skip
    return best


@kernel
def _apply(bucket, move, i, j, a, b, num_ranks):  # type: ignore[no-untyped-def]  # numba infers them
    """Swap samples i and j of buckets a and b, move i to b, or swap slots or buckets a and b."""
    if move == 0:
        bucket[i], bucket[j] = b, a
    elif move == 1:
        bucket[i] = b
    else:
        for s in range(len(bucket)):
            here = bucket[s] // num_ranks if move == 2 else bucket[s]
            if here == a:
                bucket[s] += (b - a) * (num_ranks if move == 2 else 1)
            elif here == b:
                bucket[s] += (a - b) * (num_ranks if move == 2 else 1)
