"""Compiles or loads every kernel of the scheduler, so that the first global batch does not wait for it."""

from __future__ import annotations

import numpy as np

from dflop.schedule.anneal import search
from dflop.schedule.data_parallel import balance_ranks
from dflop.schedule.linear import LinearStep
from dflop.schedule.pack import pack, token_cap, token_lpt
from dflop.schedule.place import split_items
from dflop.simulate.jit import IS_COMPILED
from dflop.simulate.kernel import StepShape, StepWork, run_step


def warm() -> None:
    """Runs all kernels once on next to nothing: tens of seconds where they were never compiled, else one.

    Nothing happens where there is no compiler.
    """
    if not IS_COMPILED:
        return
    tokens, seconds = np.array([5, 4, 3, 2, 1, 1], dtype=np.int64), np.array([5.0, 1.0, 3.0, 1.0, 1.0, 1.0])
    cap = token_cap(tokens, 4)
    token_lpt(tokens, 4)
    for num_tokens, caps in ((tokens, cap), (tokens[:, None], [cap])):
        pack(np.stack([seconds, tokens], axis=1), num_tokens, 4, cap_tokens=caps, max_evals=1000, tolerance=0.0)
    for sync in ("step", "microbatch"):
        balance_ranks(seconds, tokens, 2, cap_tokens=cap, num_microbatches=2, max_evals=100, tolerance=0.0, sync=sync)
    split_items(tokens % 2, seconds, 2, 2)
    search(_tiny_step(tokens, seconds), [tokens % 4], num_profiles=2, num_moves=10)
    run_step(*_tiny_graph())


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
        stage_kind=np.array([0, 0]),
        fixed_s=np.zeros(2),
        forward_frac=np.full(2, 0.5),
        num_after=np.array([1, 0]),
        cap_tokens=int(tokens.sum()),
        window=1,
        cap_in_flight_tokens=int(tokens.sum()),
        media_tokens=tokens[None],
        cap_media_tokens=np.zeros(1, dtype=np.int64),
        is_inline=False,
    )


def _tiny_graph() -> tuple[StepShape, StepWork]:
    """One node, one microbatch."""
    zero, one, second = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64), np.ones((1, 1))
    shape = StepShape(1, one, one, zero, zero, zero, zero, zero, zero)
    return shape, StepWork(second > 0, second, second, second, second, np.zeros(0, dtype=np.bool_))
