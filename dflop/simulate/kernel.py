"""The compiled simulator: a step in one pass over a list of operations, a few nanoseconds per operation.

As `order.py` fixes what every stage runs when, one order of all operations fits every global batch of a plan: none
comes before one it waits for. The data-parallel ranks of a pipe are lanes that run the same list side by side. What a
lane waits for is a gate, a number that is added to when the other operation ends: the time its result travels, or minus
infinity where there is nothing to wait for. Ranks that share out weights meet in every microbatch: all of a group begin
when the last of them is ready, and end with the slowest.

`run_step` takes a step as arrays over nodes; tests hold it to a graph walked in Python, to the bit. The search
(`dflop/schedule/state.py`) fills the arrays itself, with one lane per encoder.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dflop.records import LLM, Plan
from dflop.simulate.jit import kernel
from dflop.simulate.order import actions, links, num_stages_after
from dflop.simulate.step import meeting_ranks

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

STRAIGHT, ENTRY, TURN, MEET = range(4)
"""What an operation is: each lane waits for its own; the LLM's for lanes of an encoder; an encoder's for those of the
LLM; and what comes behind one of these where lanes meet."""


class Pipe(NamedTuple):
    """Stages that run the same microbatches."""

    num_lanes: int
    num_after: tuple[int, ...]
    """Per stage, stages between it and the loss."""
    kinds: tuple[int, ...]
    """Per stage: those of one kind have the same seconds and gates, numbered from 0 within the pipe."""
    groups: tuple[int, ...]
    """Per stage, how many neighbouring lanes meet in every microbatch; 1: none."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What about a plan's steps never changes.

    Pipes are encoders in plan order, then the LLM; nodes are numbered as by `step_nodes` of a plan that lists the LLM
    last: by pipe, stage, data-parallel rank.
    """

    num_microbatches: int
    pipes: tuple[Pipe, ...]
    pipe_start: Ints
    """First node of each pipe."""
    link_start: Ints
    """Per encoder, where its links begin in `StepWork.feeds`; the last entry is their number."""
    node_pipe: Ints
    node_stage: Ints

    @property
    def num_nodes(self) -> int:
        return len(self.node_pipe)


@dataclass(frozen=True, slots=True)
class StepWork:
    """One global batch on a shape: arrays over `[nodes, microbatches]`."""

    is_active: Bools
    """Whether the node has anything to do for the microbatch."""
    forward_s: Floats
    backward_s: Floats
    forward_delay_s: Floats
    backward_delay_s: Floats
    feeds: Bools
    """Flat; encoder p, microbatch k, its rank e, LLM rank r at `link_start[p] + (k * dp_p + e) * R + r`: whether e
    holds items of samples that are on r."""


def step_shape(plan: Plan) -> StepShape:
    """Shape of a plan's steps."""
    modules = sorted(plan.pipes, key=lambda m: m.module == LLM)
    pipes = tuple(
        Pipe(
            m.parallel.dp,
            tuple(num_stages_after(plan, m.module, stage) for stage in range(m.parallel.pp)),
            tuple(range(m.parallel.pp)),
            (meeting_ranks(plan, m.module),) * m.parallel.pp,
        )
        for m in modules
    )
    sizes = [m.parallel.pp * m.parallel.dp for m in modules]
    links = [plan.num_microbatches * m.parallel.dp * modules[-1].parallel.dp for m in modules[:-1]]
    stages = [(p, s) for p, m in enumerate(modules) for s in range(m.parallel.pp) for _ in range(m.parallel.dp)]
    node_pipe, node_stage = np.array(stages, dtype=np.int64).T
    return StepShape(
        plan.num_microbatches,
        pipes,
        pipe_start=np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64),
        link_start=np.concatenate([[0], np.cumsum(links)]).astype(np.int64),
        node_pipe=node_pipe.copy(),
        node_stage=node_stage.copy(),
    )


def run_step(shape: StepShape, work: StepWork) -> tuple[Floats, Floats]:
    """(start_s, end_s) of every operation, each `[nodes, microbatches, 2]`: forward, backward."""
    m = shape.num_microbatches
    program = step_program(shape.pipes, m, is_shared=False)
    seconds, gates = (
        np.zeros((program.num_seconds, program.width)),
        np.full((program.num_gates, program.width), -np.inf),
    )
    by_stage = seconds[1:].reshape(-1, 2, m, program.width)
    inside = gates[1 : 1 + len(by_stage) * 2 * m].reshape(by_stage.shape)
    stages = [(p, s) for p, pipe in enumerate(shape.pipes) for s in range(len(pipe.num_after))]
    nodes = []
    for g, (p, s) in enumerate(stages):
        dp, depth = shape.pipes[p].num_lanes, len(shape.pipes[p].num_after)
        first = int(shape.pipe_start[p]) + s * dp
        own = slice(first, first + dp)
        nodes.append(own)
        by_stage[g, :, :, :dp] = np.stack([work.forward_s[own].T, work.backward_s[own].T])
        active = work.is_active[own].T
        if s > 0:
            inside[g, 0, :, :dp] = np.where(active, work.forward_delay_s[first - dp : first].T, -np.inf)
        if s < depth - 1:
            inside[g, 1, :, :dp] = np.where(active, work.backward_delay_s[first + dp : first + 2 * dp].T, -np.inf)
    _open_crossings(shape, work, program, gates)
    ends = np.zeros((1 + len(stages) * 2 * m, program.width))
    run(program.ops, program.last, seconds, gates, ends)
    found = ends[1:].reshape(-1, 2, m, program.width)
    end: Floats = np.concatenate([found[g, :, :, : own.stop - own.start].T for g, own in enumerate(nodes)])
    return end - np.stack([work.forward_s, work.backward_s], axis=-1), end


def _open_crossings(shape: StepShape, work: StepWork, program: Program, gates: Floats) -> None:
    """Gates between encoders and the LLM."""
    m, num_ranks = shape.num_microbatches, shape.pipes[-1].num_lanes
    llm = slice(int(shape.pipe_start[-1]), int(shape.pipe_start[-1]) + num_ranks)
    back = work.backward_delay_s[llm].T[:, np.newaxis, :]
    for p, pipe in enumerate(shape.pipes[:-1]):
        dp = pipe.num_lanes
        feeds = work.feeds[shape.link_start[p] : shape.link_start[p + 1]].reshape(m, dp, num_ranks)
        first = int(shape.pipe_start[p]) + (len(pipe.num_after) - 1) * dp
        there = work.forward_delay_s[first : first + dp].T[:, :, np.newaxis]
        for start, travels in ((program.entry_at[p], there), (program.turn_at[p], back)):
            rows = gates[start : start + m * dp].reshape(m, dp, -1)
            rows[:, :, :num_ranks] = np.where(feeds, travels, -np.inf)


def makespan_s(shape: StepShape, work: StepWork) -> float:
    """When the last operation ends."""
    return float(run_step(shape, work)[1].max(initial=0.0))


class Program(NamedTuple):
    """All operations of a step, in an order that simulation can follow, and where their numbers are.

    Ends, seconds and gates are arrays of rows of `width` lanes, a row per operation. The first rows are nobody's:
    zeros, and minus infinity.
    """

    ops: Ints
    """`[operations, 7]`: what it is; rows of its end, of the end before it on its stage, of the end that it waits for,
    of its gates and of its seconds; lanes of the encoder, or that meet."""
    last: Ints
    """`[stages]` row of the last end."""
    seconds_at: Ints
    """`[kinds of all pipes, 2]` first row of forwards and of backwards; microbatches follow one another."""
    gates_at: Ints
    """As `seconds_at`: of what a stage waits for inside its pipe."""
    entry_at: Ints
    """`[encoders]` first row of what the LLM waits for; lanes of the encoder follow one another, microbatch by
    microbatch."""
    turn_at: Ints
    """As `entry_at`: of what lanes of the encoder wait for."""
    width: int
    """Lanes of all pipes, those that never have work included."""
    num_seconds: int
    num_gates: int


@functools.lru_cache(maxsize=64)
def step_program(pipes: tuple[Pipe, ...], num_slots: int, *, is_shared: bool) -> Program:
    """The program of a shape of steps.

    Args:
        pipes: Encoders, then the LLM's.
        num_slots: Microbatches.
        is_shared: Nothing travels, and encoders have one lane: one gate per microbatch serves forward and backward of
            all stages of a pipe.
    """
    m, llm, widest = num_slots, len(pipes) - 1, max(pipe.num_lanes for pipe in pipes)
    stages = [(p, s) for p, pipe in enumerate(pipes) for s in range(len(pipe.num_after))]
    kind_start = [0, *itertools.accumulate(1 + max(pipe.kinds) for pipe in pipes)]
    pipe_of_kind = [p for p, pipe in enumerate(pipes) for _ in range(1 + max(pipe.kinds))]
    seconds_at = 1 + m * np.arange(2 * len(pipe_of_kind)).reshape(-1, 2)
    gates_at = 1 + m * np.repeat(np.array(pipe_of_kind)[:, np.newaxis], 2, axis=1) if is_shared else seconds_at
    num_inside = 1 + m * (len(pipes) if is_shared else 2 * len(pipe_of_kind))
    crossing = np.cumsum([num_inside, *(m * pipe.num_lanes for pipe in pipes[:-1])])
    entry_at, turn_at = crossing[:-1], crossing[:-1] + (0 if is_shared else crossing[-1] - num_inside)

    linked = links([len(pipe.num_after) for pipe in pipes])
    both_ways = (linked, tuple((b, a) for a, b in linked))
    waits = [[a for a, b in of_phase if b == g] for g in range(len(stages)) for of_phase in both_ways]
    orders = np.array([2 * g * m + _own_order(m, pipes[p].num_after[s]) for g, (p, s) in enumerate(stages)])
    turns, before = _sequence(orders, waits, m)

    def lines(first: int) -> Iterator[Ints]:
        """`[m, 8]`: when it is the turn of an operation, and the columns of `ops`."""
        (p, s), phase, k = stages[first // 2], first % 2, np.arange(m)
        own, kind, group = first * m + k, kind_start[p] + pipes[p].kinds[s], pipes[p].groups[s]
        waited, seconds, nobody = waits[first], int(seconds_at[kind, phase]) + k, np.zeros(m, dtype=np.int64)
        for i, wait in enumerate(waited or [-1]):
            what, lanes, gates, ended = STRAIGHT, 0, nobody, nobody
            if waited:
                q, ended, gates = stages[wait][0], 1 + (2 * wait + phase) * m + k, int(gates_at[kind, phase]) + k
                if p != q:
                    lanes = pipes[min(p, q)].num_lanes
                    what, at = (TURN, turn_at[p]) if p < llm else (ENTRY, entry_at[q])
                    gates = int(at) + k * lanes
            takes = seconds if group == 1 and i == len(waited or [-1]) - 1 else nobody
            columns = (turns[own], what, 1 + own, 1 + own if i else before[own], ended, gates, takes, lanes)
            yield np.stack(np.broadcast_arrays(*columns), axis=1)
        if group > 1:
            columns = (turns[own], MEET, 1 + own, nobody, nobody, nobody, seconds, group)
            yield np.stack(np.broadcast_arrays(*columns), axis=1)

    ops = np.concatenate([line for first in np.unique(orders // m).tolist() for line in lines(first)])
    ops = ops[np.argsort(ops[:, 0], kind="stable"), 1:]
    return Program(
        ops.astype(np.uint32),  # indices that may be negative cost a comparison each
        1 + orders[:, -1],
        seconds_at,
        gates_at,
        entry_at,
        turn_at,
        widest if widest < 4 else -(-widest // 4) * 4,  # whole vectors of four
        1 + 2 * m * len(pipe_of_kind),
        int(crossing[-1] if is_shared else 2 * crossing[-1] - num_inside),
    )


def _sequence(orders: Ints, waits: Sequence[Sequence[int]], m: int) -> tuple[Ints, Ints]:
    """Each operation's place in an order in which none precedes what it waits for, and the row before it."""
    before, turns = (np.zeros(2 * m * len(orders), dtype=np.int64) for _ in range(2))
    before[orders[:, 1:]] = 1 + orders[:, :-1]
    most = max(map(len, waits))
    padded = np.array([[*of, *[-1] * (most - len(of))] for of in waits], dtype=np.int64)
    turns[_in_turn(orders, padded, m)] = np.arange(orders.size)
    return turns, before


@functools.lru_cache(maxsize=1024)
def _own_order(m: int, num_stages_after: int) -> Ints:
    """`[actions]`: what a stage runs, forwards numbered from 0, backwards from m."""
    return np.array([(a.phase == "B") * m + a.microbatch for a in actions(m, num_stages_after)], dtype=np.int64)


@kernel
def _in_turn(orders, waits, m):  # type: ignore[no-untyped-def]  # numba infers them
    """`[operations]`, none before one it waits for: `orders` `[stages, ...]`, `waits` `[2 stages, W]`, -1 for none."""
    num_stages, num_each = orders.shape
    num_done = 0
    found, is_done = np.empty(orders.size, np.int64), np.zeros(2 * m * num_stages, np.bool_)
    position = np.zeros(num_stages, np.int64)
    while num_done < orders.size:
        known = num_done
        for g in range(num_stages):
            while position[g] < num_each:
                op, is_ready = orders[g, position[g]], True
                first = op // m
                for wait in waits[first]:
                    is_ready = is_ready and (wait < 0 or is_done[(2 * wait + first % 2) * m + op % m])
                if not is_ready:
                    break
                found[num_done], is_done[op] = op, True
                num_done, position[g] = num_done + 1, position[g] + 1
        if num_done == known:
            raise RuntimeError("stages wait for one another")
    return found


@kernel
def run(ops, last, seconds, gates, ends):  # type: ignore[no-untyped-def]  # numba infers them
    """When the last operation ends; leaves the end of every operation in `ends`."""
    width = ends.shape[1]
    for i in range(len(ops)):
        what, own, before, wait, gate, takes, lanes = (
            ops[i, 0], ops[i, 1], ops[i, 2], ops[i, 3], ops[i, 4], ops[i, 5], ops[i, 6],
        )  # fmt: skip
        if what == STRAIGHT:
            for r in range(width):
                at, free = ends[wait, r] + gates[gate, r], ends[before, r]
                ends[own, r] = (at if at > free else free) + seconds[takes, r]
        elif what == ENTRY:
            for r in range(width):
                ends[own, r] = ends[before, r]
            for e in range(lanes):
                arrival = ends[wait, e]
                for r in range(width):
                    at, free = arrival + gates[gate + e, r], ends[own, r]
                    ends[own, r] = at if at > free else free
            for r in range(width):
                ends[own, r] += seconds[takes, r]
        elif what == TURN:
            for e in range(lanes):
                free = ends[before, e]
                for r in range(width):
                    at = ends[wait, r] + gates[gate + e, r]
                    free = at if at > free else free
                ends[own, e] = free + seconds[takes, e]
        else:
            for first in range(0, width, lanes):
                ready, longest = 0.0, 0.0
                for r in range(first, min(first + lanes, width)):
                    ready, longest = max(ready, ends[own, r]), max(longest, seconds[takes, r])
                for r in range(first, min(first + lanes, width)):
                    ends[own, r] = ready + longest
    makespan = 0.0
    for row in last:
        for r in range(width):
            makespan = max(makespan, ends[row, r])
    return makespan
