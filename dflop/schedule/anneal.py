"""Search on the simulator itself: assignment and order of microbatches that end the step soonest.

Balance alone leaves the pipeline's fill and drain to chance. Seeds are placed into slots that grow at the start of the
step and shrink towards its end (`ramp_profiles`); simulated annealing then swaps and moves samples, slots and buckets.
Encoders count as one rank each here. All caps hold after every move. Same step, same budget, same result, on any
machine: budgets count moves, never time.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np

from dflop.cost.model import Floats
from dflop.schedule.items import Ints
from dflop.schedule.place import place
from dflop.schedule.state import (
    State,
    Task,
    add,
    fill,
    fits,
    heaviest,
    make_state,
    refresh,
    swap_buckets,
    take,
)
from dflop.simulate.jit import kernel
from dflop.simulate.kernel import run

START_TEMPERATURE = 6e-4
"""Relative to the makespan; falls to 0 linearly. Half and twice as much found the same on the bench's steps."""
SHORTER = (8, 64)
"""Annealings beside the longest are so many times shorter."""
FROM_HEAVIEST = 0.9
"""Share of the moves of samples that begin with what a slot waits for, where ranks meet in it."""
SWAP_SAMPLES, MOVE_SAMPLE, SWAP_SLOTS = 0.5, 0.75, 0.85
"""Cumulative shares of the moves; the rest swaps buckets."""


@functools.lru_cache(maxsize=64)
def ramp_profiles(num_slots: int, depth: int, most: int) -> Floats:
    """`[profiles, slots]` relative sizes of slots, all but the flat one.

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
    picked = np.unique(np.linspace(0, len(ramps) - 1, min(most, len(ramps))).astype(int)).tolist() if most > 0 else []
    return np.array([ramps[i] for i in picked])


def search(task: Task, seeds: list[Ints], *, depth: int, num_profiles: int, num_moves: int) -> list[Ints]:
    """Buckets `slot * ranks + rank` of every sample: the best found, then others that a better judge may prefer.

    Those are the best start and what shorter annealings find: the longer one searches, the more of what is found is
    the linear step's error.

    Args:
        task: The step; has samples.
        seeds: Assignments to start from, beside the ramps; those that break a cap are left out.
        depth: Stages from the first encoder stage to the loss.
        num_profiles: Ramps to try.
        num_moves: Budget of the annealing, in moves tried; all but those that break a cap are simulated.
    """
    starts = [*seeds, *place(task, ramp_profiles(task.num_slots, depth, num_profiles))]
    values = [score(task, bucket) for bucket in starts]
    best = int(np.argmin(values))
    if num_moves < 1 or values[best] == np.inf:
        return [starts[best]]
    found: list[tuple[float, Ints]] = []
    for number, length in enumerate([num_moves, *(num_moves // n for n in SHORTER if num_moves >= n)]):
        state = make_state(task, starts[best])
        fill(task, state)
        found.append(_anneal(task, state, np.random.default_rng((0, number)), length))
    found.append((values[best], starts[best]))
    return [bucket for _, bucket in sorted(found, key=lambda pair: pair[0])]


def score(task: Task, bucket: Ints) -> float:
    """Makespan of an assignment; infinite where it breaks a cap."""
    state: State = make_state(task, bucket)
    return float(run(task.ops, task.last, state.seconds, state.gates, state.ends)) if fill(task, state) else np.inf


@kernel
def _anneal(task, state, rng, num_moves):  # type: ignore[no-untyped-def]  # numba infers them
    """(makespan, bucket of every sample) of the best assignment on the way."""
    num_samples, num_buckets, lanes = len(state.content_of), len(state.bucket_sum), task.num_lanes
    best_content, best_bucket = state.content_of.copy(), state.bucket_of.copy()
    value = run(task.ops, task.last, state.seconds, state.gates, state.ends)
    best_value = value
    for done in range(num_moves):
        draw, i, j = rng.random(), int(rng.random() * num_samples), num_samples
        if task.meets and draw < MOVE_SAMPLE and rng.random() < FROM_HEAVIEST:
            i = heaviest(task, state, int(rng.random() * task.num_slots), rng.random(), rng.random(), i)
        if draw < SWAP_SAMPLES:
            j = int(rng.random() * num_samples)
            a, b = state.bucket_of[state.content_of[i]], state.bucket_of[state.content_of[j]]
        elif draw < MOVE_SAMPLE:
            a, b = state.bucket_of[state.content_of[i]], int(rng.random() * num_buckets)
        elif draw < SWAP_SLOTS:
            a, b = int(rng.random() * task.num_slots) * lanes, int(rng.random() * task.num_slots) * lanes
        else:
            a, b = int(rng.random() * num_buckets), int(rng.random() * num_buckets)
        if a == b:
            continue
        width = lanes if MOVE_SAMPLE <= draw < SWAP_SLOTS else 1
        _change(task, state, draw, i, j, a, b)
        is_valid = True
        for r in range(width):
            is_valid = is_valid and fits(task, state, a + r, num_samples) and fits(task, state, b + r, num_samples)
        if is_valid:
            refresh(task, state, a, b, width)
            # The worst step that a drawn number lets pass, so that one comparison decides.
            temperature = START_TEMPERATURE * value * (1.0 - done / num_moves)
            limit = value - temperature * np.log(1.0 - rng.random())
            new = run(task.ops, task.last, state.seconds, state.gates, state.ends)
            if new <= limit:
                value = new
                if new < best_value:
                    best_value = new
                    best_content[:] = state.content_of
                    best_bucket[:] = state.bucket_of
                continue
        _change(task, state, draw, i, j, b, a)
        if is_valid:
            refresh(task, state, a, b, width)
    return best_value, best_bucket[best_content]


@kernel
def _change(task, state, draw, i, j, a, b):  # type: ignore[no-untyped-def]  # numba infers them
    """Sample i from bucket a to b (and j the other way), or slots or buckets a and b swapped; a and b undo it."""
    if draw < MOVE_SAMPLE:
        take(task, state, i, a)
        add(task, state, i, b)
        if draw < SWAP_SAMPLES:
            take(task, state, j, b)
            add(task, state, j, a)
    elif draw < SWAP_SLOTS:
        for r in range(task.num_lanes):
            swap_buckets(task, state, a + r, b + r)
    else:
        swap_buckets(task, state, a, b)
