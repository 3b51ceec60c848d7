"""The compiled twin of `simulate(step_graph(...))`: one training step in 10-20 ns per operation.

Nothing is built per step: which operation a node runs when follows from 1F1B, and what an operation waits for follows
from the plan's shape and from which encoder ranks feed which LLM ranks. Both agree to the last bit, which a property
test holds; annealing and the planner call this one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflop.records import LLM, Plan
from dflop.simulate.jit import kernel
from dflop.simulate.step import num_stages_after

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StepShape:
    """What about a plan's steps never changes.

    Pipes are encoders in plan order, then the LLM; nodes are numbered as by `step_nodes` of a plan that lists the LLM
    last: by pipe, stage, data-parallel rank.
    """

    num_microbatches: int
    pipe_pp: Ints
    pipe_dp: Ints
    pipe_start: Ints
    """First node of each pipe."""
    link_start: Ints
    """Per encoder, where its links begin in `StepWork.feeds`; the last entry is their number."""
    node_pipe: Ints
    node_stage: Ints
    node_rank: Ints
    num_after: Ints
    """Per node, stages between it and the loss."""

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
    pipes = sorted(plan.pipes, key=lambda m: m.module == LLM)
    nodes = [
        (p, stage, rank, num_stages_after(plan, m.module, stage))
        for p, m in enumerate(pipes)
        for stage in range(m.parallel.pp)
        for rank in range(m.parallel.dp)
    ]
    columns = np.array(nodes, dtype=np.int64).T
    sizes = [m.parallel.pp * m.parallel.dp for m in pipes]
    links = [plan.num_microbatches * m.parallel.dp * pipes[-1].parallel.dp for m in pipes[:-1]]
    return StepShape(
        plan.num_microbatches,
        pipe_pp=np.array([m.parallel.pp for m in pipes], dtype=np.int64),
        pipe_dp=np.array([m.parallel.dp for m in pipes], dtype=np.int64),
        pipe_start=np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64),
        link_start=np.concatenate([[0], np.cumsum(links)]).astype(np.int64),
        node_pipe=columns[0].copy(),
        node_stage=columns[1].copy(),
        node_rank=columns[2].copy(),
        num_after=columns[3].copy(),
    )


def run_step(shape: StepShape, work: StepWork) -> tuple[Floats, Floats]:
    """(start_s, end_s) of every operation, each `[nodes, microbatches, 2]`: forward, backward."""
    start, end = _run(
        shape.num_microbatches,
        shape.pipe_pp, shape.pipe_dp, shape.pipe_start, shape.link_start,
        shape.node_pipe, shape.node_stage, shape.node_rank, shape.num_after,
        work.is_active, work.forward_s, work.backward_s, work.forward_delay_s, work.backward_delay_s, work.feeds,
    )  # fmt: skip
    assert (end >= 0).all(), "operations wait for one another in a circle: the schedule is wrong, not the input"
    return start.reshape(shape.num_nodes, -1, 2), end.reshape(shape.num_nodes, -1, 2)


def makespan_s(shape: StepShape, work: StepWork) -> float:
    """When the last operation ends."""
    return float(run_step(shape, work)[1].max(initial=0.0))


@kernel
def action_at(position: int, num_microbatches: int, num_after: int) -> tuple[int, int]:
    """(microbatch, 0 forward or 1 backward) that 1F1B runs at a position; see `one_f_one_b`."""
    warm = min(num_microbatches, num_after)
    if position < warm:
        return position, 0
    steady = position - warm
    if steady < 2 * (num_microbatches - warm):
        return (warm + steady // 2, 0) if steady % 2 == 0 else (steady // 2, 1)
    return steady - (num_microbatches - warm), 1


@kernel
def _run(  # type: ignore[no-untyped-def]  # numba infers them
    num_microbatches, pipe_pp, pipe_dp, pipe_start, link_start, node_pipe, node_stage, node_rank, num_after,
    is_active, forward_s, backward_s, forward_delay_s, backward_delay_s, feeds,
):  # fmt: skip
    """Every node goes on until it waits for something; what ends wakes the nodes that wait for it."""
    num_nodes, num_pipes = len(node_pipe), len(pipe_pp)
    llm, llm_dp, llm_start = num_pipes - 1, pipe_dp[num_pipes - 1], pipe_start[num_pipes - 1]
    num_ops = 2 * num_nodes * num_microbatches
    start, end = np.zeros(num_ops), np.full(num_ops, -1.0)
    position, free = np.zeros(num_nodes, np.int64), np.zeros(num_nodes)
    first_waiting, next_waiting = np.full(num_ops, -1, np.int64), np.full(num_nodes, -1, np.int64)
    stack = np.arange(num_nodes)
    size = num_nodes
    while size:
        size -= 1
        node = stack[size]
        pipe, stage, rank, at = node_pipe[node], node_stage[node], node_rank[node], free[node]
        last = pipe_pp[pipe] - 1
        while position[node] < 2 * num_microbatches:
            k, phase = action_at(position[node], num_microbatches, num_after[node])
            op = 2 * (node * num_microbatches + k) + phase
            blocker = -1
            if is_active[node, k]:
                # The one stage before (forward) or behind (backward) in the same pipe, or the ranks across the edge.
                neighbour = stage - 1 if phase == 0 else stage + 1
                if 0 <= neighbour <= last:
                    other = node + (pipe_dp[pipe] if phase else -pipe_dp[pipe])
                    ended = end[2 * (other * num_microbatches + k) + phase]
                    if ended < 0:
                        blocker = 2 * (other * num_microbatches + k) + phase
                    else:
                        at = max(at, ended + (backward_delay_s[other, k] if phase else forward_delay_s[other, k]))
                elif pipe == llm and phase == 0:
                    for encoder in range(num_pipes - 1):
                        dp = pipe_dp[encoder]
                        behind = pipe_start[encoder] + (pipe_pp[encoder] - 1) * dp
                        for e in range(dp):
                            if feeds[link_start[encoder] + (k * dp + e) * llm_dp + rank]:
                                other = behind + e
                                ended = end[2 * (other * num_microbatches + k)]
                                if ended < 0:
                                    blocker = 2 * (other * num_microbatches + k)
                                    break
                                at = max(at, ended + forward_delay_s[other, k])
                        if blocker >= 0:
                            break
                elif pipe != llm and phase == 1:
                    row = link_start[pipe] + (k * pipe_dp[pipe] + rank) * llm_dp
                    for r in range(llm_dp):
                        if feeds[row + r]:
                            other = llm_start + r
                            ended = end[2 * (other * num_microbatches + k) + 1]
                            if ended < 0:
                                blocker = 2 * (other * num_microbatches + k) + 1
                                break
                            at = max(at, ended + backward_delay_s[other, k])
            if blocker >= 0:
                next_waiting[node] = first_waiting[blocker]
                first_waiting[blocker] = node
                break
            start[op] = at
            if is_active[node, k]:
                at += backward_s[node, k] if phase else forward_s[node, k]
            end[op] = at
            position[node] += 1
            free[node] = at
            waiting = first_waiting[op]
            while waiting >= 0:
                stack[size] = waiting
                size += 1
                waiting = next_waiting[waiting]
            first_waiting[op] = -1
    return start, end
