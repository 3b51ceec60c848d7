"""What the search knows about an assignment, and how a move changes it: sums per bucket and slot, durations, caps.

Seconds are rounded to multiples of a power of two, so small against their sum that it changes nothing and so large
that every sum of them is exact. So samples are added to a bucket and taken away again without a residue, in any order,
and a sum never has to be made anew. Buckets are numbered `slot * lanes + lane`.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from dflop.schedule.items import Ints
from dflop.schedule.linear import LinearStep
from dflop.simulate.jit import inlined, kernel
from dflop.simulate.kernel import Floats, Pipe, step_program
from dflop.simulate.step import EXPOSED_FRAC

UNLIMITED = 1 << 62


class Task(NamedTuple):
    """A linear step as the kernels take it.

    A sample is a row of D numbers that add up: its seconds per row of chain and of encoder stages, 1 for itself, its
    tokens, per encoder pipe its items, per encoder its tokens there, and where it matters those of a layer that reruns.
    """

    samples: Floats
    """`[samples + 1, D]`; the last is no sample, all zeros."""
    largest_s: Floats
    """`[samples, K]` of `LinearStep`."""
    slowness: Floats
    """`[Q, lanes]` of `LinearStep`: what multiplies the seconds of a chain's column."""
    num_slots: int
    num_lanes: int
    first: Ints
    """Columns at which encoder seconds, the count, items, encoder tokens and seconds of a layer that reruns begin."""
    kinds: Ints
    """`[kinds, 7]` of stages, encoders' before the chain's: pipe, first part, end of its parts, whether its ranks meet,
    and first rows of seconds of forwards, of backwards, and of gates."""
    parts: Ints
    """`[parts, 4]`: column of `samples`; lanes that meet, 1: none; first and end of its limits."""
    part_s: Floats
    """`[parts, 6]`: fixed seconds, forward share, and of a forward, then of a backward, all and exposed messages."""
    limits: Ints
    """Tokens of a bucket above each of which one more layer of a part reruns."""
    rerun_fixed_s: float
    """Seconds of every bucket, for each such layer."""
    entry_at: Ints
    """Per encoder, first row of gates of what the chain waits for."""
    num_encoder_kinds: int
    meets: bool
    """Whether lanes wait for one another in every slot."""
    window: int
    cap_tokens: int
    cap_window_tokens: int
    cap_bucket_media: Ints
    """Per encoder."""
    cap_slot_media: Ints
    """Per encoder."""
    ops: Ints
    last: Ints
    """Both of `Program`."""
    sizes: tuple[int, int, int, int]
    """Rows of seconds, gates, ends; lanes of a row."""


class State(NamedTuple):
    """An assignment under way. Buckets change places as a whole: samples are in contents, contents in buckets."""

    content_of: Ints
    """`[samples]`."""
    bucket_of: Ints
    """`[contents]`."""
    content_in: Ints
    """`[buckets]`, the inverse."""
    bucket_sum: Floats
    """`[buckets, D]`."""
    slot_sum: Floats
    """`[slots, D]`."""
    bucket_largest_s: Floats
    """`[buckets, K]` of the samples inside."""
    first_in: Ints
    """`[contents]` any of the samples, from where `after` leads to the others; -1: none."""
    before: Ints
    """`[samples]`."""
    after: Ints
    """`[samples]`."""
    seconds: Floats
    """Rows as `Program` says; so are the next two."""
    gates: Floats
    ends: Floats


def make_task(step: LinearStep) -> Task:
    """Everything about a step that no move changes."""
    num_chain, num_encoder = len(step.chain_s), len(step.slot_s)
    num_encoder_stages = int(step.pipe_pp[:-1].sum())
    pipes, kinds, parts, stage = [], [], [], 0
    for p, pp in enumerate(step.pipe_pp.tolist()):
        own = step.stage_parts[stage : stage + pp]
        distinct = list(dict.fromkeys(own))
        groups = tuple(max(part.group for part in of) for of in own)
        is_chain = stage >= num_encoder_stages
        after = tuple(step.num_after[stage : stage + pp].tolist())
        # One lane stands for all ranks of an encoder: with whom each meets makes no difference.
        pipes.append(Pipe(
            step.num_ranks if is_chain else 1, after, tuple(distinct.index(of) for of in own),
            groups if is_chain else (1,) * pp,
        ))  # fmt: skip
        kinds += [(p, len(of), int(max(part.group for part in of) > 1)) for of in distinct]
        parts += [part._replace(row=part.row + (0 if is_chain else num_chain)) for of in distinct for part in of]
        stage += pp
    program = step_program(tuple(pipes), step.num_slots, is_shared=True)
    first_part = np.cumsum([0, *(num_parts for _, num_parts, _ in kinds)]).tolist()
    rows = [
        *map(exact, step.chain_s), *map(exact, step.slot_s), np.ones(len(step.tokens)), step.tokens, *step.num_items,
        *step.media_tokens, *map(exact, step.rerun_s[np.newaxis] if len(step.rerun_s) else ()),
    ]  # fmt: skip
    end_limit = np.cumsum([0, *(len(part.limits) for part in parts)]).tolist()
    media = np.where(step.cap_media_tokens > 0, step.cap_media_tokens, UNLIMITED).astype(np.int64)
    free = np.full(len(media), UNLIMITED, dtype=np.int64)
    return Task(
        samples=np.concatenate([np.array(rows, dtype=float).T, np.zeros((1, len(rows)))]),
        largest_s=np.ascontiguousarray(step.largest_s.T),
        slowness=np.ascontiguousarray(step.chain_slowness),
        num_slots=step.num_slots,
        num_lanes=step.num_ranks,
        first=np.cumsum([num_chain, num_encoder, 2, len(step.num_items), len(step.media_tokens)], dtype=np.int64),
        kinds=np.array(
            [
                (p, first, first + num_parts, meets, *seconds_at, gates_at)
                for (p, num_parts, meets), first, seconds_at, gates_at in zip(
                    kinds, first_part[:-1], program.seconds_at.tolist(), program.gates_at[:, 0].tolist(), strict=True
                )
            ],
            dtype=np.int64,
        ),
        parts=np.array(
            [(part.row, part.group, *ends) for part, ends in zip(parts, itertools.pairwise(end_limit), strict=True)],
            dtype=np.int64,
        ),
        part_s=np.array(
            [
                (part.fixed_s, part.forward_frac, ahead_s, EXPOSED_FRAC * ahead_s, back_s, EXPOSED_FRAC * back_s)
                for part in parts
                for ahead_s, back_s in [(part.gather_s, part.gather_s + part.scatter_s)]
            ]
        ),
        limits=np.array([limit for part in parts for limit in part.limits], dtype=np.int64),
        rerun_fixed_s=step.rerun_fixed_s,
        entry_at=program.entry_at,
        meets=step.meets,
        num_encoder_kinds=sum(p < len(step.pipe_pp) - 1 for p, _, _ in kinds),
        window=step.window,
        cap_tokens=step.cap_tokens,
        cap_window_tokens=step.cap_in_flight_tokens,
        cap_bucket_media=np.where(step.on_chain, media, free),
        cap_slot_media=np.where(step.on_chain, free, media),
        ops=program.ops,
        last=program.last,
        sizes=(program.num_seconds, program.num_gates, 1 + 2 * step.num_slots * stage, program.width),
    )


def exact(seconds: Floats) -> Floats:
    """The same to one part in 2^52 of the sum, in steps of a power of two: sums of any of them are exact."""
    total = float(seconds.sum())
    if total <= 0:
        return seconds
    quantum = 2.0 ** (np.ceil(np.log2(total)) - 51)
    rounded: Floats = np.round(seconds / quantum) * quantum
    return rounded


def make_state(task: Task, bucket: Ints) -> State:
    """An assignment whose sums `fill` has yet to make."""
    num_buckets, num_columns = task.num_slots * task.num_lanes, task.samples.shape[1]
    every = np.arange(num_buckets)
    nowhere = np.full(len(bucket), -1, dtype=np.int64)
    return State(
        content_of=bucket.astype(np.int64),
        bucket_of=every,
        content_in=every.copy(),
        bucket_sum=np.zeros((num_buckets, num_columns)),
        slot_sum=np.zeros((task.num_slots, num_columns)),
        bucket_largest_s=np.zeros((num_buckets, task.largest_s.shape[1])),
        first_in=np.full(num_buckets, -1, dtype=np.int64),
        before=nowhere,
        after=nowhere.copy(),
        seconds=np.zeros((task.sizes[0], task.sizes[3])),
        gates=np.full((task.sizes[1], task.sizes[3]), -np.inf),
        ends=np.zeros((task.sizes[2], task.sizes[3])),
    )


@kernel
def fill(task, state):  # type: ignore[no-untyped-def]  # numba infers them
    """All sums and durations from the samples' buckets; whether all caps are kept."""
    for i in range(len(state.content_of)):
        add(task, state, i, state.bucket_of[state.content_of[i]])
    for k in range(task.num_slots):
        refresh(task, state, k * task.num_lanes, k * task.num_lanes, task.num_lanes)
    is_valid = True
    for b in range(len(state.bucket_sum)):
        is_valid = is_valid and fits(task, state, b, len(state.content_of))
    return is_valid


@inlined
def rerun_s(sums, parts, p, limits, fixed_s, column, bucket):  # type: ignore[no-untyped-def]  # numba infers them
    """Seconds in which layers of a part run again, of a bucket."""
    above, end, tokens = parts[p, 2], parts[p, 3], sums[bucket, column[1] + 1]
    while above < end:  # halves what is left of ascending limits
        middle = (above + end) // 2
        if tokens > limits[middle]:
            above = middle + 1
        else:
            end = middle
    return (above - parts[p, 2]) * (sums[bucket, column[4]] + fixed_s) if above > parts[p, 2] else 0.0


@kernel
def meet(seconds, sums, slot_sum, slowness, kind, parts, part_s, limits, fixed_s, column, k, lanes):  # type: ignore[no-untyped-def]  # numba infers them
    """Seconds of a chain's stage whose ranks meet, module by module: those of the slowest of a group."""
    forward, backward = kind[4] + k, kind[5] + k
    for r in range(lanes):
        seconds[forward, r] = seconds[backward, r] = 0.0
    for p in range(kind[1], kind[2]):
        q, fixed, frac, group = parts[p, 0], part_s[p, 0], part_s[p, 1], parts[p, 1]
        if slot_sum[k, q] <= 0:
            continue
        for first in range(0, lanes, group):
            end, ahead, back = min(first + group, lanes), 0.0, 0.0
            for r in range(first, end):
                own = sums[k * lanes + r, q]
                took = (own + fixed) * slowness[q, r] if own > 0 else 0.0
                again = rerun_s(sums, parts, p, limits, fixed_s, column, k * lanes + r) * slowness[q, r]
                ahead, back = max(ahead, frac * took), max(back, (1 - frac) * took + again)
            for r in range(first, end):
                seconds[forward, r] += max(ahead + part_s[p, 3], part_s[p, 2])
                seconds[backward, r] += max(back + part_s[p, 5], part_s[p, 4])


@kernel
def refresh(task, state, a, b, width):  # type: ignore[no-untyped-def]  # numba infers them
    """Durations and gates of `width` buckets from a and from b on, and of the slots they begin in, from their sums.

    All in one piece: a call with so many arrays costs more than what it does.
    """
    kinds, sums, lanes, seconds, gates = task.kinds, state.bucket_sum, task.num_lanes, state.seconds, state.gates
    num_encoder, parts, part_s, limits = task.num_encoder_kinds, task.parts, task.part_s, task.limits
    slowness = task.slowness
    for turn, begin in enumerate((a, b)):
        for bucket in range(begin, begin + width):
            k, r = bucket // lanes, bucket % lanes
            is_active = sums[bucket, task.first[1]] > 0
            for c in range(num_encoder, len(kinds)):
                p, forward, backward = kinds[c, 1], kinds[c, 4] + k, kinds[c, 5] + k
                gates[kinds[c, 6] + k, r] = 0.0 if is_active else -np.inf
                if not kinds[c, 3]:  # else it depends on other buckets of the slot
                    q = parts[p, 0]
                    took = (sums[bucket, q] + part_s[p, 0]) * slowness[q, r] if is_active else 0.0
                    again = rerun_s(sums, parts, p, limits, task.rerun_fixed_s, task.first, bucket) * slowness[q, r]
                    ahead, back = part_s[p, 1] * took + part_s[p, 3], (1 - part_s[p, 1]) * took + again + part_s[p, 5]
                    seconds[forward, r] = max(ahead, part_s[p, 2]) if is_active else 0.0
                    seconds[backward, r] = max(back, part_s[p, 4]) if is_active else 0.0
            for e in range(len(task.entry_at)):
                gates[task.entry_at[e] + k, r] = 0.0 if sums[bucket, task.first[2] + e] > 0 else -np.inf
        k = begin // lanes
        if turn and k == a // lanes:
            continue
        for c in range(num_encoder):
            p, q = kinds[c, 1], parts[kinds[c, 1], 0]
            is_active, took = state.slot_sum[k, task.first[2] + kinds[c, 0]] > 0, state.slot_sum[k, q]
            gates[kinds[c, 6] + k, 0] = 0.0 if is_active else -np.inf
            for bucket in range(k * lanes, (k + 1) * lanes):  # an equal share for every rank, or the largest item
                took = max(took, state.bucket_largest_s[bucket, q - task.first[0]])
            took += part_s[p, 0]
            ahead, back = part_s[p, 1] * took + part_s[p, 3], (1 - part_s[p, 1]) * took + part_s[p, 5]
            seconds[kinds[c, 4] + k, 0] = max(ahead, part_s[p, 2]) if is_active else 0.0
            seconds[kinds[c, 5] + k, 0] = max(back, part_s[p, 4]) if is_active else 0.0
        for c in range(num_encoder, len(kinds)):
            if kinds[c, 3]:
                meet(
                    seconds, sums, state.slot_sum, slowness, kinds[c], parts, part_s, limits, task.rerun_fixed_s,
                    task.first, k, lanes,
                )  # fmt: skip


@kernel
def heaviest(task, state, k, which, where, otherwise):  # type: ignore[no-untyped-def]  # numba infers them
    """A sample of the bucket of a slot that takes longest, in a column of the chain's; numbers 0 to 1 choose both."""
    lanes, q = task.num_lanes, int(which * task.first[0])
    worst = k * lanes
    for b in range(k * lanes + 1, (k + 1) * lanes):
        if state.bucket_sum[b, q] * task.slowness[q, b - k * lanes] > (
            state.bucket_sum[worst, q] * task.slowness[q, worst - k * lanes]
        ):
            worst = b
    i = state.first_in[state.content_in[worst]]
    for _ in range(int(where * state.bucket_sum[worst, task.first[1]])):
        i = state.after[i]
    return i if i >= 0 else otherwise


@inlined
def fits(task, state, b, i):  # type: ignore[no-untyped-def]  # numba infers them
    """Whether a bucket, its slot and all windows it is in keep the caps with sample i on top."""
    # Into variables first: numba counts a reference for every array taken out of a tuple.
    sums, slot_sum, samples, first = state.bucket_sum, state.slot_sum, task.samples, task.first
    cap_bucket, cap_slot, lanes, window = task.cap_bucket_media, task.cap_slot_media, task.num_lanes, task.window
    tokens, media, k = first[1] + 1, first[3], b // lanes
    if sums[b, tokens] + samples[i, tokens] > task.cap_tokens:
        return False
    for e in range(len(cap_slot)):
        if sums[b, media + e] + samples[i, media + e] > cap_bucket[e]:
            return False
        if slot_sum[k, media + e] + samples[i, media + e] > cap_slot[e]:
            return False
    if task.cap_window_tokens >= window * task.cap_tokens:
        return True
    begin, end = max(0, k - window + 1), min(task.num_slots, k + window)
    total = samples[i, tokens]
    for s in range(begin, end):
        total += sums[s * lanes + b % lanes, tokens]
        if s - begin >= window:
            total -= sums[(s - window) * lanes + b % lanes, tokens]
        if total > task.cap_window_tokens:
            return False
    return True


@inlined
def add(task, state, i, b):  # type: ignore[no-untyped-def]  # numba infers them
    """Sample i, which is nowhere, to bucket b."""
    content = state.content_in[b]
    state.content_of[i] = content
    state.before[i], state.after[i] = -1, state.first_in[content]
    if state.first_in[content] >= 0:
        state.before[state.first_in[content]] = i
    state.first_in[content] = i
    for d in range(task.samples.shape[1]):
        state.bucket_sum[b, d] += task.samples[i, d]
        state.slot_sum[b // task.num_lanes, d] += task.samples[i, d]
    for q in range(task.largest_s.shape[1]):
        state.bucket_largest_s[b, q] = max(state.bucket_largest_s[b, q], task.largest_s[i, q])


@inlined
def take(task, state, i, b):  # type: ignore[no-untyped-def]  # numba infers them
    """Sample i out of bucket b."""
    before, after = state.before[i], state.after[i]
    if before >= 0:
        state.after[before] = after
    else:
        state.first_in[state.content_in[b]] = after
    if after >= 0:
        state.before[after] = before
    for d in range(task.samples.shape[1]):
        state.bucket_sum[b, d] -= task.samples[i, d]
        state.slot_sum[b // task.num_lanes, d] -= task.samples[i, d]
    for q in range(task.largest_s.shape[1]):
        if 0 < task.largest_s[i, q] == state.bucket_largest_s[b, q]:
            largest, j = 0.0, state.first_in[state.content_in[b]]
            while j >= 0:
                largest, j = max(largest, task.largest_s[j, q]), state.after[j]
            state.bucket_largest_s[b, q] = largest


@inlined
def swap_buckets(task, state, a, b):  # type: ignore[no-untyped-def]  # numba infers them
    """Bucket a's content to b and the other way round."""
    in_a, in_b = state.content_in[a], state.content_in[b]
    state.content_in[a], state.content_in[b] = in_b, in_a
    state.bucket_of[in_a], state.bucket_of[in_b] = b, a
    ka, kb = a // task.num_lanes, b // task.num_lanes
    for d in range(task.samples.shape[1]):
        of_a, of_b = state.bucket_sum[a, d], state.bucket_sum[b, d]
        state.bucket_sum[a, d], state.bucket_sum[b, d] = of_b, of_a
        state.slot_sum[ka, d] += of_b - of_a
        state.slot_sum[kb, d] += of_a - of_b
    for q in range(task.largest_s.shape[1]):
        of_a, of_b = state.bucket_largest_s[a, q], state.bucket_largest_s[b, q]
        state.bucket_largest_s[a, q], state.bucket_largest_s[b, q] = of_b, of_a
