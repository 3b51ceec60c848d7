"""When every operation of a graph starts and ends.

A node (one pipeline stage of one data-parallel rank) runs its operations strictly in order; an operation also waits
for operations of other nodes. One pass, about 1 us per operation; `kernel.py` does the same for the graph of a training
step in nanoseconds.
"""

from __future__ import annotations

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

    def arrival_s(self, end: Sequence[float], op: int) -> float:
        """When the result of an operation that ended is where it is needed."""
        return end[op] + self.delays_s[op] if self.delays_s else end[op]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Start and end of every operation."""

    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    makespan_s: float


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
    return Timeline(tuple(start), tuple(end), max(end, default=0.0))


def _check_finished(graph: OpGraph, position: list[int]) -> None:
    stuck = [(n, ops[p]) for n, (ops, p) in enumerate(zip(graph.node_ops, position, strict=True)) if p < len(ops)]
    if stuck:
        node, op = stuck[0]
        raise DeadlockError(f"operation {op} of node {node} waits for ever on {graph.depends_on[op]}; stuck: {stuck}")
