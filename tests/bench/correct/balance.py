"""Batches dealt out to slots: dflop's packing where all ranks are alike, a plain search where one is slow."""

from __future__ import annotations

import numpy as np

from dflop.cost.model import Floats
from dflop.schedule.items import Ints
from dflop.schedule.pack import pack, token_cap

MAX_EVALS = 200_000
TOLERANCE = 2e-4
MAX_ROUNDS = 200


def balanced(weights_s: Floats, tokens: Ints, num_slots: int, slowness: Floats) -> Ints:
    """Slot of every sample, for a slowest slot as fast as possible.

    Args:
        weights_s: `[samples, 2]`, seconds in encoder and LLM.
        tokens: `[samples]`, of the LLM.
        num_slots: Slot b runs on LLM rank `b % ranks`.
        slowness: Per rank of the LLM.
    """
    if np.all(slowness == slowness[0]):
        weights_s = weights_s * [1.0, slowness[0]]
        cap = token_cap(tokens, num_slots)
        found = pack(weights_s, tokens, num_slots, cap_tokens=cap, max_evals=MAX_EVALS, tolerance=TOLERANCE)
        return np.array(found.bucket)
    pace = np.stack([np.ones(num_slots), slowness[np.arange(num_slots) % len(slowness)]], axis=1)
    return _improved(weights_s, pace, _longest_first(weights_s, pace))


def height_s(weights_s: Floats, slot: Ints, num_slots: int, slowness: Floats) -> float:
    """Seconds of the slowest slot."""
    loads = slot_loads(weights_s, slot, num_slots, slowness)
    return float(loads.max())


def slot_loads(weights_s: Floats, slot: Ints, num_slots: int, slowness: Floats) -> Floats:
    """`[slots, 2]` seconds of encoder and LLM."""
    loads = np.stack([np.bincount(slot, column, num_slots) for column in weights_s.T], axis=1)
    loads[:, 1] *= slowness[np.arange(num_slots) % len(slowness)]
    return loads


def _longest_first(weights_s: Floats, pace: Floats) -> Ints:
    """Each sample, longest first, to the slot that stays lowest."""
    loads, slot = np.zeros_like(pace), np.zeros(len(weights_s), dtype=np.int64)
    for i in np.argsort(-weights_s.sum(axis=1), kind="stable"):
        slot[i] = ((loads + weights_s[i]) * pace).max(axis=1).argmin()
        loads[slot[i]] += weights_s[i]
    return slot


def _improved(weights_s: Floats, pace: Floats, slot: Ints) -> Ints:
    """Swaps and moves out of the slowest slot until none lowers it."""
    weights_s = np.concatenate([weights_s, np.zeros((len(pace), 2))])
    slot = np.concatenate([slot, np.arange(len(pace))])  # nothing, in every slot: swapping with it is a move
    loads = np.stack([np.bincount(slot, column, len(pace)) for column in weights_s.T], axis=1)
    for _ in range(MAX_ROUNDS):
        heights = (loads * pace).max(axis=1)
        worst = int(heights.argmax())
        inside, outside = np.flatnonzero(slot == worst), np.flatnonzero(slot != worst)
        change = weights_s[inside][:, None] - weights_s[outside][None]
        here = ((loads[worst] - change) * pace[worst]).max(axis=2)
        there = ((loads[slot[outside]][None] + change) * pace[slot[outside]][None]).max(axis=2)
        after = np.maximum(here, there)
        i, j = np.unravel_index(int(after.argmin()), after.shape)
        if after[i, j] >= heights[worst] * (1 - 1e-9):
            break
        other = slot[outside[j]]
        loads[worst] -= change[i, j]
        loads[other] += change[i, j]
        slot[inside[i]], slot[outside[j]] = other, worst
    return slot[: len(slot) - len(pace)]
