"""Compiles or loads every kernel of the scheduler, so that the first global batch does not wait for it."""

from __future__ import annotations

import numpy as np

from dflop.schedule.anneal import search
from dflop.schedule.data_parallel import balance_ranks
from dflop.schedule.linear import LinearStep, Part
from dflop.schedule.splitting import split_items
from dflop.schedule.state import make_task


def warm() -> None:
    """Runs all kernels once on next to nothing: tens of seconds where they were never compiled, else one."""
    tokens, seconds = np.array([5, 4, 3, 2, 1, 1], dtype=np.int64), np.array([5.0, 1.0, 3.0, 1.0, 1.0, 1.0])
    balance_ranks(seconds, tokens, 2, cap_tokens=10, num_microbatches=2, max_evals=100, tolerance=0.0)
    split_items(tokens % 2, seconds, 2, 2)
    search(make_task(_tiny_step(tokens, seconds)), [tokens % 4], depth=2, num_profiles=2, num_moves=10)


def _tiny_step(tokens: np.ndarray, seconds: np.ndarray) -> LinearStep:
    """Two slots of two ranks behind one encoder."""
    return LinearStep(
        num_slots=2,
        num_ranks=2,
        chain_s=seconds[None],
        chain_slowness=np.ones((1, 2)),
        slot_s=seconds[None],
        largest_s=seconds[None],
        tokens=tokens,
        num_items=np.ones((1, len(tokens)), dtype=np.int64),
        pipe_pp=np.array([1, 1]),
        stage_parts=((Part(0, 0.0, 0.5),), (Part(0, 0.0, 0.5),)),
        num_after=np.array([1, 0]),
        cap_tokens=int(tokens.sum()),
        window=1,
        cap_in_flight_tokens=int(tokens.sum()),
        media_tokens=tokens[None],
        cap_media_tokens=np.zeros(1, dtype=np.int64),
        on_chain=np.zeros(1, dtype=np.bool_),
    )
