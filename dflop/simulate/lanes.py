"""The simulator of the search: a step of whole slots, a nanosecond or two per operation.

Here an encoder has one logical rank and the LLM's data-parallel ranks are lanes that run the same list of operations
side by side. As 1F1B fixes what every stage runs when, one order of all operations fits every global batch: no
operation comes before one it waits for, so one pass over the list is the simulation, and lanes are vectors. What a
lane does not wait for has a gate of minus infinity in front. Agrees with `kernel.py` to the last bit.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dflop.simulate.events import OpGraph, simulate
from dflop.simulate.jit import kernel
from dflop.simulate.pipeline_order import one_f_one_b

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ENCODER, TURN, ENTRY, CHAIN = range(4)
"""Inside an encoder; its last stage's backward, which waits for all lanes; the chain's first forward; in the chain."""


class Program(NamedTuple):
    """All operations of a step of one shape, in an order that simulation can follow."""

    ops: Ints
    """`[operations, 6]`: what it is, row of the operation before it on its stage, row of the one it waits for, row of
    its seconds, row of its gate, its own row. Row 0 of ends is time zero."""
    feeding: Ints
    """`[encoders, slots]` rows of the forwards that the chain's first stage waits for."""
    num_encoder_rows: int
    num_chain_rows: int


class Workspace(NamedTuple):
    """Seconds and gates of one step, and room for when operations end."""

    encoder_s: Floats
    """`[2 x encoder stage kinds x slots]`, forward then backward of a kind."""
    encoder_gate: Floats
    """`[encoders x slots]` 0 where there is work, else minus infinity."""
    chain_s: Floats
    """`[2 x chain stage kinds x slots, lanes]`."""
    chain_gate: Floats
    """`[slots, lanes]`."""
    feed_gate: Floats
    """`[encoders x slots, lanes]` 0 where the lane's samples have items of the encoder."""
    encoder_end_s: Floats
    chain_end_s: Floats


@functools.lru_cache(maxsize=64)
def lane_program(
    pipe_pp: tuple[int, ...], num_after: tuple[int, ...], stage_kind: tuple[int, ...], num_slots: int
) -> Program:
    """The program of a shape.

    Args:
        pipe_pp: Stages of every encoder, then of the chain.
        num_after: Per stage of all pipes, stages between it and the loss.
        stage_kind: Per stage of all pipes, its kind; the chain's and the encoders' are numbered apart.
        num_slots: Microbatches.
    """
    num_encoders, first_chain = len(pipe_pp) - 1, sum(pipe_pp[:-1])
    stages = [(p, s, s == pp - 1) for p, pp in enumerate(pipe_pp) for s in range(pp)]
    first_of = np.concatenate([[0], np.cumsum(pipe_pp)]).tolist()

    def op(stage: int, phase: int, k: int) -> int:
        return (2 * stage + phase) * num_slots + k

    def row(found: int) -> int:
        return 1 + found - (2 * first_chain * num_slots if found >= op(first_chain, 0, 0) else 0)

    orders = [
        [op(g, int(a.phase == "B"), a.microbatch) for a in one_f_one_b(num_slots, n)] for g, n in enumerate(num_after)
    ]
    before = {b: row(a) for order in orders for a, b in itertools.pairwise(order)}
    waits: list[tuple[int, ...]] = []
    lines: list[tuple[int, int, int, int, int, int]] = []
    for g, (p, s, is_last) in enumerate(stages):
        in_chain = p == num_encoders
        for phase in (0, 1):
            for k in range(num_slots):
                wait: tuple[int, ...] = ()
                what, gate = (CHAIN, k) if in_chain else (ENCODER, p * num_slots + k)
                if phase == 0 and s > 0:
                    wait = (op(g - 1, 0, k),)
                elif phase == 0 and in_chain and num_encoders:
                    what, wait = ENTRY, tuple(op(first_of[e + 1] - 1, 0, k) for e in range(num_encoders))
                elif phase == 1 and not is_last:
                    wait = (op(g + 1, 1, k),)
                elif phase == 1 and not in_chain:
                    what, wait = TURN, (op(first_chain, 1, k),)
                waits.append(wait)
                seconds, own = (2 * stage_kind[g] + phase) * num_slots + k, op(g, phase, k)
                lines.append((what, before.get(own, 0), row(wait[0]) if wait else 0, seconds, gate, row(own)))
    graph = OpGraph(tuple(map(tuple, orders)), (1.0,) * len(lines), tuple(waits))
    order = np.argsort(simulate(graph).start_s, kind="stable")
    return Program(
        np.array(lines, dtype=np.int64)[order],
        np.array(
            [[row(op(first_of[e + 1] - 1, 0, k)) for k in range(num_slots)] for e in range(num_encoders)],
            dtype=np.int64,
        ).reshape(-1, num_slots),
        1 + 2 * first_chain * num_slots,
        1 + 2 * pipe_pp[-1] * num_slots,
    )


@kernel
def run_lanes(program, work):  # type: ignore[no-untyped-def]  # numba infers them
    """Makespan; leaves the end of every operation in the workspace."""
    ops, feeding = program.ops, program.feeding
    encoder_s, chain_s = work.encoder_s, work.chain_s
    encoder_gate, chain_gate, feed_gate = work.encoder_gate, work.chain_gate, work.feed_gate
    encoder_end_s, chain_end_s = work.encoder_end_s, work.chain_end_s
    num_slots, num_lanes = chain_gate.shape
    for i in range(len(ops)):
        what, before, wait, seconds, gate, own = ops[i, 0], ops[i, 1], ops[i, 2], ops[i, 3], ops[i, 4], ops[i, 5]
        if what == CHAIN:
            for r in range(num_lanes):
                at, free = chain_end_s[wait, r] + chain_gate[gate, r], chain_end_s[before, r]
                chain_end_s[own, r] = (at if at > free else free) + chain_s[seconds, r]
        elif what == ENTRY:
            for r in range(num_lanes):
                chain_end_s[own, r] = chain_end_s[before, r]
            for e in range(len(feeding)):
                arrival = encoder_end_s[feeding[e, gate]]
                for r in range(num_lanes):
                    at, free = arrival + feed_gate[e * num_slots + gate, r], chain_end_s[own, r]
                    chain_end_s[own, r] = at if at > free else free
            for r in range(num_lanes):
                chain_end_s[own, r] += chain_s[seconds, r]
        elif what == ENCODER:
            at, free = encoder_end_s[wait] + encoder_gate[gate], encoder_end_s[before]
            encoder_end_s[own] = (at if at > free else free) + encoder_s[seconds]
        else:
            free = encoder_end_s[before]
            for r in range(num_lanes):
                at = chain_end_s[wait, r] + feed_gate[gate, r]
                free = at if at > free else free
            encoder_end_s[own] = free + encoder_s[seconds]
    # Every stage ends with its last backward.
    makespan = 0.0
    for row in range(2 * num_slots, len(encoder_end_s), 2 * num_slots):
        makespan = max(makespan, encoder_end_s[row])
    for row in range(2 * num_slots, len(chain_end_s), 2 * num_slots):
        for r in range(num_lanes):
            makespan = max(makespan, chain_end_s[row, r])
    return makespan
