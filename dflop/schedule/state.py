"""What the search knows about an assignment, and how a move changes it: sums per bucket and slot, durations, caps.

Seconds are rounded to multiples of a power of two, so small against their sum that it changes nothing and so large
that every sum of them is exact. So samples are added to a bucket and taken away again without a residue, in any order,
and a sum never has to be made anew. Buckets are numbered `slot * lanes + lane`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dflop.schedule.items import Ints
from dflop.schedule.linear import LinearStep
from dflop.simulate.jit import inlined, kernel
from dflop.simulate.lanes import Floats, Program, Workspace, lane_program

UNLIMITED = 1 << 62


class Task(NamedTuple):
    """A linear step as the kernels take it.

    A sample is a row of D numbers that add up: its seconds per kind of chain and of encoder stages, 1 for itself, its
    tokens, per encoder pipe its items, per encoder its tokens there.
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
    """Columns at which encoder seconds, the count, items and encoder tokens begin."""
    kind_column: Ints
    """Per kind of stage, the chain's first: its column of `samples`."""
    kind_pipe: Ints
    """Per kind of stage: its pipe."""
    fixed_s: Floats
    """Per kind of stage."""
    forward_frac: Floats
    """Per kind of stage."""
    num_chain_kinds: int
    window: int
    cap_tokens: int
    cap_window_tokens: int
    cap_bucket_media: Ints
    """Per encoder."""
    cap_slot_media: Ints
    """Per encoder."""
    program: Program


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
    work: Workspace


def make_task(step: LinearStep) -> Task:
    """Everything about a step that no move changes."""
    stages = list(zip(step.stage_kind.tolist(), step.fixed_s.tolist(), step.forward_frac.tolist(), strict=True))
    num_encoder_stages = int(step.pipe_pp[:-1].sum())
    pipe = np.repeat(np.arange(len(step.pipe_pp)), step.pipe_pp).tolist()
    chain = list(dict.fromkeys(stages[num_encoder_stages:]))
    encoder = list(dict.fromkeys((pipe[g], *stages[g]) for g in range(num_encoder_stages)))
    kind = [encoder.index((pipe[g], *stages[g])) for g in range(num_encoder_stages)]
    kind += [chain.index(stage) for stage in stages[num_encoder_stages:]]
    num_chain, num_encoder = len(step.chain_s), len(step.slot_s)
    count = num_chain + num_encoder
    kinds = [(q, len(step.pipe_pp) - 1, fixed, frac) for q, fixed, frac in chain]
    kinds += [(num_chain + q, p, fixed, frac) for p, q, fixed, frac in encoder]
    rows = [
        *map(exact, step.chain_s), *map(exact, step.slot_s), np.ones(len(step.tokens)), step.tokens, *step.num_items,
        *step.media_tokens,
    ]  # fmt: skip
    media = np.where(step.cap_media_tokens > 0, step.cap_media_tokens, UNLIMITED).astype(np.int64)
    free = np.full(len(media), UNLIMITED, dtype=np.int64)
    return Task(
        samples=np.concatenate([np.array(rows, dtype=float).T, np.zeros((1, len(rows)))]),
        largest_s=np.ascontiguousarray(step.largest_s.T),
        slowness=np.ascontiguousarray(step.chain_slowness),
        num_slots=step.num_slots,
        num_lanes=step.num_ranks,
        first=np.array([num_chain, count, count + 2, count + 2 + len(step.num_items)], dtype=np.int64),
        kind_column=np.array([k[0] for k in kinds], dtype=np.int64),
        kind_pipe=np.array([k[1] for k in kinds], dtype=np.int64),
        fixed_s=np.array([k[2] for k in kinds]),
        forward_frac=np.array([k[3] for k in kinds]),
        num_chain_kinds=len(chain),
        window=step.window,
        cap_tokens=step.cap_tokens,
        cap_window_tokens=step.cap_in_flight_tokens,
        cap_bucket_media=media if step.is_inline else free,
        cap_slot_media=free if step.is_inline else media,
        program=lane_program(
            tuple(step.pipe_pp.tolist()), tuple(step.num_after.tolist()), tuple(kind), step.num_slots
        ),
    )  # fmt: skip


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
    lanes, slots = _padded(task.num_lanes), task.num_slots
    num_encoder_kinds, num_pipes = len(task.kind_pipe) - task.num_chain_kinds, len(task.program.feeding)
    work = Workspace(
        encoder_s=np.zeros(2 * num_encoder_kinds * slots),
        encoder_gate=np.zeros(num_pipes * slots),
        chain_s=np.zeros((2 * task.num_chain_kinds * slots, lanes)),
        chain_gate=np.full((slots, lanes), -np.inf),
        feed_gate=np.full((num_pipes * slots, lanes), -np.inf),
        encoder_end_s=np.zeros(task.program.num_encoder_rows),
        chain_end_s=np.zeros((task.program.num_chain_rows, lanes)),
    )
    every = np.arange(num_buckets)
    nowhere = np.full(len(bucket), -1, dtype=np.int64)
    return State(
        content_of=bucket.astype(np.int64),
        bucket_of=every,
        content_in=every.copy(),
        bucket_sum=np.zeros((num_buckets, num_columns)),
        slot_sum=np.zeros((slots, num_columns)),
        bucket_largest_s=np.zeros((num_buckets, task.largest_s.shape[1])),
        first_in=np.full(num_buckets, -1, dtype=np.int64),
        before=nowhere,
        after=nowhere.copy(),
        work=work,
    )


def _padded(num_lanes: int) -> int:
    """Whole vectors of four; lanes behind the last one never have work."""
    return num_lanes if num_lanes < 4 else -(-num_lanes // 4) * 4


@kernel
def fill(task, state):  # type: ignore[no-untyped-def]  # numba infers them
    """All sums and durations from the samples' buckets; whether all caps are kept."""
    for i in range(len(state.content_of)):
        add(task, state, i, state.bucket_of[state.content_of[i]])
    for b in range(len(state.bucket_sum)):
        refresh_bucket(task, state, b)
    for k in range(task.num_slots):
        refresh_slot(task, state, k)
    is_valid = True
    for b in range(len(state.bucket_sum)):
        is_valid = is_valid and fits(task, state, b, len(state.content_of))
    return is_valid


@inlined
def refresh_bucket(task, state, b):  # type: ignore[no-untyped-def]  # numba infers them
    """Durations and gates of a bucket from its sums."""
    num_slots, work, sums = task.num_slots, state.work, state.bucket_sum
    k, r = b // task.num_lanes, b % task.num_lanes
    is_active = sums[b, task.first[1]] > 0
    work.chain_gate[k, r] = 0.0 if is_active else -np.inf
    for c in range(task.num_chain_kinds):
        q = task.kind_column[c]
        seconds = (sums[b, q] + task.fixed_s[c]) * task.slowness[q, r] if is_active else 0.0
        row = 2 * c * num_slots + k
        work.chain_s[row, r] = task.forward_frac[c] * seconds
        work.chain_s[row + num_slots, r] = (1 - task.forward_frac[c]) * seconds
    for e in range(len(task.program.feeding)):
        work.feed_gate[e * num_slots + k, r] = 0.0 if sums[b, task.first[2] + e] > 0 else -np.inf


@inlined
def refresh_slot(task, state, k):  # type: ignore[no-untyped-def]  # numba infers them
    """Durations and gates of a slot's encoders from its sums."""
    num_slots, work = task.num_slots, state.work
    for e in range(len(task.program.feeding)):
        work.encoder_gate[e * num_slots + k] = 0.0 if state.slot_sum[k, task.first[2] + e] > 0 else -np.inf
    for c in range(task.num_chain_kinds, len(task.kind_column)):
        is_active = state.slot_sum[k, task.first[2] + task.kind_pipe[c]] > 0
        seconds = slot_s(task, state, k, task.kind_column[c]) + task.fixed_s[c] if is_active else 0.0
        row = 2 * (c - task.num_chain_kinds) * num_slots + k
        work.encoder_s[row] = task.forward_frac[c] * seconds
        work.encoder_s[row + num_slots] = (1 - task.forward_frac[c]) * seconds


@inlined
def fits(task, state, b, i):  # type: ignore[no-untyped-def]  # numba infers them
    """Whether a bucket, its slot and all windows it is in keep the caps with sample i on top."""
    lanes, tokens, media = task.num_lanes, task.first[1] + 1, task.first[3]
    sums, k = state.bucket_sum, b // task.num_lanes
    if sums[b, tokens] + task.samples[i, tokens] > task.cap_tokens:
        return False
    for e in range(len(task.cap_slot_media)):
        if sums[b, media + e] + task.samples[i, media + e] > task.cap_bucket_media[e]:
            return False
        if state.slot_sum[k, media + e] + task.samples[i, media + e] > task.cap_slot_media[e]:
            return False
    if task.cap_window_tokens >= task.window * task.cap_tokens:
        return True
    begin, end = max(0, k - task.window + 1), min(task.num_slots, k + task.window)
    total = task.samples[i, tokens]
    for s in range(begin, end):
        total += sums[s * lanes + b % lanes, tokens]
        if s - begin >= task.window:
            total -= sums[(s - task.window) * lanes + b % lanes, tokens]
        if total > task.cap_window_tokens:
            return False
    return True


@inlined
def slot_s(task, state, k, q):  # type: ignore[no-untyped-def]  # numba infers them
    """Seconds of a slot in an encoder column: an equal share for every rank, or the largest item."""
    seconds = state.slot_sum[k, q]
    for b in range(k * task.num_lanes, (k + 1) * task.num_lanes):
        seconds = max(seconds, state.bucket_largest_s[b, q - task.first[0]])
    return seconds


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
