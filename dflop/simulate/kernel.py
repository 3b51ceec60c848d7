"""The compiled simulator: a step in one pass over a list of operations, a few nanoseconds per operation.

As 1F1B fixes what every stage runs when, one order of all operations fits every global batch of a plan: none comes
before one it waits for. The data-parallel ranks of a pipe are lanes that run the same list side by side. What a lane
waits for is a gate, a number that is added to when the other operation ends: the time its result travels, or minus
infinity where there is nothing to wait for. Ranks that share out weights meet in every microbatch: all of a group begin
when the last of them is ready, and end with the slowest.

`run_step` takes a step as arrays over nodes and agrees with `simulate(step_graph(...))` to the bit. The search
(`dflop/schedule/state.py`) fills the arrays itself, with one lane per encoder.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dflop.records import LLM, Plan
from dflop.simulate.events import OpGraph, simulate
from dflop.simulate.jit import kernel
from dflop.simulate.pipeline_order import one_f_one_b
from dflop.simulate.step import meeting_ranks, num_stages_after

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MEET, STRAIGHT = -1, 0
"""In place of how many lanes an operation waits for: the lanes of a stage meet; each lane waits for its own."""


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
    m, program = shape.num_microbatches, step_program(shape.pipes, shape.num_microbatches, is_shared=False)
    seconds, gates = np.zeros(program.num_seconds), np.full(program.num_gates, -np.inf)
    where, stage = [], 0
    for p, pipe in enumerate(shape.pipes):
        width = int(program.width[p])
        for s in range(len(pipe.num_after)):
            first = shape.pipe_start[p] + s * pipe.num_lanes
            nodes = slice(first, first + pipe.num_lanes)
            lanes = np.arange(m)[:, np.newaxis] * width + np.arange(pipe.num_lanes)
            active = work.is_active[nodes].T
            taken = ((work.forward_s, work.forward_delay_s, -1), (work.backward_s, work.backward_delay_s, 1))
            for phase, (seconds_s, delay_s, other) in enumerate(taken):
                # A group in which fillers run takes time where a rank has nothing to do.
                seconds[program.seconds_at[stage, phase] + lanes] = seconds_s[nodes].T
                if 0 <= s + other < len(pipe.num_after):
                    travels = delay_s[first + other * pipe.num_lanes :][: pipe.num_lanes].T
                    gates[program.gates_at[stage, phase] + lanes] = np.where(active, travels, -np.inf)
            forward_at = program.last[stage, 0] - (2 * m - 1) * width + lanes.T
            where.append(np.stack([forward_at, forward_at + m * width], axis=-1))
            stage += 1
    _open_crossings(shape, work, program, gates)
    ends = np.zeros(program.num_ends)
    run(program, seconds, gates, ends)
    end: Floats = ends[np.concatenate(where)]
    return end - np.stack([work.forward_s, work.backward_s], axis=-1), end


def _open_crossings(shape: StepShape, work: StepWork, program: Program, gates: Floats) -> None:
    """Gates between encoders and the LLM."""
    m, num_ranks, llm_width = shape.num_microbatches, shape.pipes[-1].num_lanes, int(program.width[-1])
    llm = slice(shape.pipe_start[-1], shape.pipe_start[-1] + num_ranks)
    for p, pipe in enumerate(shape.pipes[:-1]):
        dp, width = pipe.num_lanes, int(program.width[p])
        feeds = work.feeds[shape.link_start[p] : shape.link_start[p + 1]].reshape(m, dp, num_ranks)
        first = shape.pipe_start[p] + (len(pipe.num_after) - 1) * dp
        there = work.forward_delay_s[first : first + dp].T[:, :, np.newaxis]
        back = work.backward_delay_s[llm].T[:, np.newaxis, :]
        k, e, r = np.meshgrid(np.arange(m), np.arange(dp), np.arange(num_ranks), indexing="ij")
        gates[program.entry_at[p] + (k * width + e) * llm_width + r] = np.where(feeds, there, -np.inf)
        gates[program.turn_at[p] + (k * llm_width + r) * width + e] = np.where(feeds, back, -np.inf)


def makespan_s(shape: StepShape, work: StepWork) -> float:
    """When the last operation ends."""
    return float(run_step(shape, work)[1].max(initial=0.0))


class Program(NamedTuple):
    """All operations of a step, in an order that simulation can follow, and where their numbers are.

    Ends, seconds and gates are flat; operations of one lane after the other. Each begins with a row of zeros, or of
    minus infinity, that is nobody's.
    """

    ops: Ints
    """`[operations, 7]`: where it ends, ends of the one before it on its stage, ends of what it waits for, lanes it
    waits for, gates or lanes that meet, seconds, lanes."""
    last: Ints
    """`[stages, 2]`: where the last operation of a stage ends, lanes."""
    seconds_at: Ints
    """`[kinds of all pipes, 2]`: of forwards and of backwards; microbatch k of lane r is `k * lanes + r` further."""
    gates_at: Ints
    """As `seconds_at`: of what a stage waits for inside its pipe."""
    entry_at: Ints
    """`[encoders]`: lane r of the LLM waits for lane e of the encoder at `(k * lanes of the encoder + e) * lanes + r`
    further."""
    turn_at: Ints
    """`[encoders]`: lane e of the encoder waits for lane r at `(k * lanes + r) * lanes of the encoder + e` further."""
    width: Ints
    """`[pipes]` lanes, those that never have work included."""
    num_ends: int
    num_seconds: int
    num_gates: int


def padded(num_lanes: int) -> int:
    """Whole vectors of four; lanes behind the last one never have work."""
    return num_lanes if num_lanes < 4 else -(-num_lanes // 4) * 4


@functools.lru_cache(maxsize=64)
def step_program(pipes: tuple[Pipe, ...], num_slots: int, *, is_shared: bool) -> Program:
    """The program of a shape of steps.

    Args:
        pipes: Encoders, then the LLM's.
        num_slots: Microbatches.
        is_shared: Nothing travels, and encoders have one lane: one gate per microbatch serves forward and backward of
            all stages.
    """
    return _Builder(pipes, num_slots, is_shared).program()


class _Builder:
    def __init__(self, pipes: tuple[Pipe, ...], num_slots: int, is_shared: bool) -> None:
        self.pipes, self.num_slots = pipes, num_slots
        self.width = [padded(p.num_lanes) for p in pipes]
        self.stages = [(p, s) for p, pipe in enumerate(pipes) for s in range(len(pipe.num_after))]
        self.kind_start = np.cumsum([0, *(1 + max(pipe.kinds) for pipe in pipes)])
        widest, block, llm = max(self.width), [w * num_slots for w in self.width], self.width[-1]
        kinds = [p for p, pipe in enumerate(pipes) for _ in range(1 + max(pipe.kinds))]
        of_stage = [2 * block[p] for p, _ in self.stages]
        self.ends_at = np.cumsum([widest, *of_stage])
        self.seconds_at = np.cumsum([widest, *(block[p] for p in kinds for _ in range(2))])
        if is_shared:
            gates = np.cumsum([widest, *block])
            self.gates_at = np.array([[gates[p], gates[p]] for p in kinds])
        else:
            gates = np.cumsum([widest, *(block[p] for p in kinds for _ in range(2))])
            self.gates_at = gates[:-1].reshape(-1, 2)
        crossing = [block[p] * llm for p in range(len(pipes) - 1)]
        self.entry_at = gates[-1] + np.cumsum([0, *crossing])
        self.turn_at = self.entry_at if is_shared else self.entry_at[-1] + np.cumsum([0, *crossing])

    def program(self) -> Program:
        num_pipes = len(self.pipes)
        ops = [line for g, phase, k in self._in_order() for line in self._lines(g, phase, k)]
        return Program(
            np.array(ops, dtype=np.int64).reshape(-1, 7),
            np.array([(self._end(g, 1, self.num_slots - 1), self.width[p]) for g, (p, _) in enumerate(self.stages)]),
            self.seconds_at[:-1].reshape(-1, 2).copy(),
            self.gates_at.copy(),
            self.entry_at[: num_pipes - 1].copy(),
            self.turn_at[: num_pipes - 1].copy(),
            np.array(self.width),
            int(self.ends_at[-1]),
            int(self.seconds_at[-1]),
            int(self.turn_at[-1]),
        )

    def _end(self, stage: int, phase: int, k: int) -> int:
        p, _ = self.stages[stage]
        return int(self.ends_at[stage]) + (phase * self.num_slots + k) * self.width[p]

    def _waits(self, stage: int, phase: int) -> list[int]:
        """Stages whose operation on the same microbatch one waits for."""
        p, s = self.stages[stage]
        llm, first_llm = len(self.pipes) - 1, len(self.stages) - len(self.pipes[-1].num_after)
        if phase == 0:
            if s > 0:
                return [stage - 1]
            return [g for g, (q, t) in enumerate(self.stages) if p == llm != q and t == len(self.pipes[q].kinds) - 1]
        if s < len(self.pipes[p].num_after) - 1:
            return [stage + 1]
        return [first_llm] if p != llm else []

    def _in_order(self) -> list[tuple[int, int, int]]:
        """(stage, 0 forward or 1 backward, microbatch), none before one it waits for."""
        m = self.num_slots
        after = [self.pipes[p].num_after[s] for p, s in self.stages]
        orders = [tuple((2 * g + (a.phase == "B")) * m + a.microbatch for a in one_f_one_b(m, n))
                  for g, n in enumerate(after)]  # fmt: skip
        ops = [(g, phase, k) for g in range(len(after)) for phase in (0, 1) for k in range(m)]
        waits = tuple(tuple((2 * w + phase) * m + k for w in self._waits(g, phase)) for g, phase, k in ops)
        start = simulate(OpGraph(tuple(orders), (1.0,) * len(ops), waits)).start_s
        self.before = {b: a for order in orders for a, b in itertools.pairwise(order)}
        return [ops[i] for i in np.argsort(start, kind="stable")]

    def _lines(self, stage: int, phase: int, k: int) -> list[tuple[int, ...]]:
        p, s = self.stages[stage]
        m, width, own = self.num_slots, self.width[p], self._end(stage, phase, k)
        kind = int(self.kind_start[p]) + self.pipes[p].kinds[s]
        previous = self.before.get((2 * stage + phase) * m + k)
        before = 0 if previous is None else self._end(stage, previous // m % 2, previous % m)
        seconds = int(self.seconds_at[2 * kind + phase]) + k * width
        lines = []
        for wait in self._waits(stage, phase):
            q = self.stages[wait][0]
            if p == q:
                lines.append(
                    (own, before, self._end(wait, phase, k), STRAIGHT, int(self.gates_at[kind, phase]) + k * width)
                )
            else:
                start = self.turn_at[p] if phase else self.entry_at[q]
                gates = int(start) + k * width * self.width[q]
                lines.append((own, own if lines else before, self._end(wait, phase, k), self.width[q], gates))
        lines = lines or [(own, before, 0, STRAIGHT, 0)]
        takes = [*([0] * (len(lines) - 1)), seconds]
        found: list[tuple[int, ...]] = [(*line, of, width) for line, of in zip(lines, takes, strict=True)]
        group = self.pipes[p].groups[s]
        if group == 1:
            return found
        return [*found[:-1], (*lines[-1], 0, width), (own, 0, 0, MEET, group, seconds, self.pipes[p].num_lanes)]


@kernel
def run(program, seconds, gates, ends):  # type: ignore[no-untyped-def]  # numba infers them
    """When the last operation ends; leaves the end of every operation in `ends`."""
    ops = program.ops
    for i in range(len(ops)):
        own, before, wait, sources = ops[i, 0], ops[i, 1], ops[i, 2], ops[i, 3]
        gate, takes, width = ops[i, 4], ops[i, 5], ops[i, 6]
        if sources == STRAIGHT:
            for r in range(width):
                at, free = ends[wait + r] + gates[gate + r], ends[before + r]
                ends[own + r] = (at if at > free else free) + seconds[takes + r]
        elif sources == MEET:
            for first in range(0, width, gate):
                ready, longest = 0.0, 0.0
                for r in range(first, min(first + gate, width)):
                    ready, longest = max(ready, ends[own + r]), max(longest, seconds[takes + r])
                for r in range(first, min(first + gate, width)):
                    ends[own + r] = ready + longest
        else:
            for r in range(width):
                ends[own + r] = ends[before + r]
            for e in range(sources):
                arrival = ends[wait + e]
                for r in range(width):
                    at, free = arrival + gates[gate + e * width + r], ends[own + r]
                    ends[own + r] = at if at > free else free
            for r in range(width):
                ends[own + r] += seconds[takes + r]
    makespan = 0.0
    for g in range(len(program.last)):
        for r in range(program.last[g, 1]):
            makespan = max(makespan, ends[program.last[g, 0] + r])
    return makespan
