from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulate.graph import DeadlockError, OpGraph, simulate

DURATIONS = st.integers(0, 80).map(lambda n: n / 8)


@st.composite
def graphs(draw: st.DrawFn) -> OpGraph:
    """Acyclic: operations are numbered in a valid order and depend on smaller numbers only."""
    num_nodes, num_ops = draw(st.integers(1, 5)), draw(st.integers(1, 20))
    home = draw(st.lists(st.integers(0, num_nodes - 1), min_size=num_ops, max_size=num_ops))
    return OpGraph(
        node_ops=tuple(tuple(op for op in range(num_ops) if home[op] == node) for node in range(num_nodes)),
        durations_s=tuple(draw(st.lists(DURATIONS, min_size=num_ops, max_size=num_ops))),
        depends_on=tuple(
            tuple(draw(st.lists(st.integers(0, op - 1), max_size=3))) if op else () for op in range(num_ops)
        ),
        delays_s=tuple(draw(st.lists(DURATIONS, min_size=num_ops, max_size=num_ops))),
    )


@given(graphs(), st.data())
def test_longer_operations_never_shorten_the_step(graph, data):
    op = data.draw(st.integers(0, len(graph.durations_s) - 1))
    durations = list(graph.durations_s)
    durations[op] += data.draw(DURATIONS)
    slower = dataclasses.replace(graph, durations_s=tuple(durations))
    assert simulate(slower).makespan_s >= simulate(graph).makespan_s


def test_a_chain_with_a_delay():
    graph = OpGraph(((0,), (1,)), (1.0, 2.0), ((), (0,)), delays_s=(0.5, 0.5))
    timeline = simulate(graph)
    assert (timeline.start_s, timeline.makespan_s) == ((0.0, 1.5), 3.5)


def test_deadlock_names_the_operation():
    with pytest.raises(DeadlockError, match="operation 0 of node 0 waits"):
        simulate(OpGraph(((0,), (1,)), (1.0, 1.0), ((1,), (0,))))


def test_no_operations_take_no_time():
    assert simulate(OpGraph(((), ()), (), ())).makespan_s == 0.0
