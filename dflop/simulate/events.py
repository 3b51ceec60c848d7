"""When every operation of a graph starts and ends.

A node (one pipeline stage of one data-parallel rank) runs its operations strictly in order; an operation also waits
for operations of other nodes. `simulate` needs one pass, about 1 us per operation; `kernel.py` does the same for the
graph of a training step in nanoseconds. `simulate_reference` walks time event by event: slower, easier to believe, and
the only one that knows that on a machine with fewer cores than processes an operation slows down while others run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


class DeadlockError(AssertionError):
    """The operations wait for one another in a circle: the schedule or the routing is wrong, not the input."""


@dataclass(frozen=True, slots=True)
class OpGraph:
    """Operations, numbered from 0, and what each waits for."""

    node_ops: tuple[tuple[int, ...], ...]
    """Per node its operations in the order they run; every operation is on exactly one node."""
    durations_s: tuple[float, ...]
    depends_on: tuple[tuple[int, ...], ...]
    """Per operation those of other nodes it waits for; order within a node is implied."""
    delays_s: tuple[float, ...] = ()
    """Per operation the time its result travels: those that wait for it start no earlier; empty: none."""
    num_processes: tuple[int, ...] = ()
    """Per node those that compute its operations together, as tensor-parallel ranks do; empty: one each."""

    def processes_of(self, node: int) -> int:
        """Processes that compute while a node does."""
        return self.num_processes[node] if self.num_processes else 1

    def arrival_s(self, end: Sequence[float], op: int) -> float:
        """When the result of an operation that ended is where it is needed."""
        return end[op] + self.delays_s[op] if self.delays_s else end[op]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Start and end of every operation, and how busy each node was."""

    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    """Per node the time inside operations, slow-down by contention included: what the process itself would measure."""

    @property
    def idle_frac(self) -> float:
        """Share of node time spent waiting."""
        available_s = self.makespan_s * len(self.busy_s)
        return 1.0 - sum(self.busy_s) / available_s if available_s > 0 else 0.0


def simulate(graph: OpGraph) -> Timeline:
    """Timeline when every node computes at full speed.

    Raises:
        DeadlockError: the dependencies contain a cycle.
    """
    start, end = [0.0] * len(graph.durations_s), [-1.0] * len(graph.durations_s)
    position, free = [0] * len(graph.node_ops), [0.0] * len(graph.node_ops)
    parked: dict[int, list[int]] = {}
    runnable = list(range(len(graph.node_ops)))
    while runnable:
        node = runnable.pop()
        ops, at = graph.node_ops[node], free[node]
        for i in range(position[node], len(ops)):
            op = ops[i]
            blocker = next((dep for dep in graph.depends_on[op] if end[dep] < 0), None)
            if blocker is not None:
                parked.setdefault(blocker, []).append(node)
                position[node] = i
                break
            for dep in graph.depends_on[op]:
                at = max(at, graph.arrival_s(end, dep))
            start[op] = at
            at += graph.durations_s[op]
            end[op] = at
            runnable += parked.pop(op, ())
        else:
            position[node] = len(ops)
        free[node] = at
    _check_finished(graph, position)
    return _timeline(graph, start, end)


def simulate_reference(graph: OpGraph, *, max_concurrency: int | None = None) -> Timeline:
    """Timeline when at most `max_concurrency` processes' worth of compute is available (no limit if None).

    With `n` processes computing, each operation progresses at rate `min(1, max_concurrency / n)` (processor sharing).

    Raises:
        DeadlockError: the dependencies contain a cycle.
    """
    assert max_concurrency is None or max_concurrency >= 1, f"max_concurrency {max_concurrency}"
    start, end = [0.0] * len(graph.durations_s), [math.inf] * len(graph.durations_s)
    position = [0] * len(graph.node_ops)
    running: dict[int, float] = {}  # node -> seconds of compute its current operation still needs
    now = 0.0
    while True:
        ready = _heads_ready_s(graph, position, end, running)
        for node, at in ready.items():
            if at <= now:
                op = graph.node_ops[node][position[node]]
                start[op], running[node] = now, graph.durations_s[op]
        if not running and all(at == math.inf for at in ready.values()):
            break
        limit = math.inf if max_concurrency is None else max_concurrency
        computing = sum(graph.processes_of(node) for node, left in running.items() if left > 0)
        rate = min(1.0, limit / computing) if computing else 1.0
        next_start = min((at for at in ready.values() if at > now), default=math.inf)
        least = min(running.values(), default=math.inf)
        step = min(least / rate, next_start - now)
        now = next_start if step < least / rate else now + step
        for node, left in list(running.items()):
            if left == least and step == least / rate:
                end[graph.node_ops[node][position[node]]] = now
                position[node] += 1
                del running[node]
            else:
                running[node] = max(0.0, left - step * rate)
    _check_finished(graph, position)
    return _timeline(graph, start, end)


def _heads_ready_s(
    graph: OpGraph, position: list[int], end: list[float], running: dict[int, float]
) -> dict[int, float]:
    """Per idle node with work left, when its next operation may start; infinite while a dependency is unfinished."""
    return {
        node: max((graph.arrival_s(end, dep) for dep in graph.depends_on[ops[position[node]]]), default=0.0)
        for node, ops in enumerate(graph.node_ops)
        if node not in running and position[node] < len(ops)
    }


def _check_finished(graph: OpGraph, position: list[int]) -> None:
    stuck = [(n, ops[p]) for n, (ops, p) in enumerate(zip(graph.node_ops, position, strict=True)) if p < len(ops)]
    if stuck:
        node, op = stuck[0]
        raise DeadlockError(f"operation {op} of node {node} waits for ever on {graph.depends_on[op]}; stuck: {stuck}")


def _timeline(graph: OpGraph, start: list[float], end: list[float]) -> Timeline:
    busy = tuple(sum(end[op] - start[op] for op in ops) for ops in graph.node_ops)
    return Timeline(tuple(start), tuple(end), max(end, default=0.0), busy)
