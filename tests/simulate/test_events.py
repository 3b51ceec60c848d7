from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.simulate.events import DeadlockError, OpGraph, simulate, simulate_reference

# Eighths, so that sums are exact and the two simulators can be compared to the bit.
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


@given(graphs())
def test_fast_equals_reference_without_contention(graph):
    assert simulate(graph) == simulate_reference(graph)
    assert simulate(graph) == simulate_reference(graph, max_concurrency=len(graph.node_ops))


@given(graphs(), st.data())
def test_longer_operations_never_shorten_the_step(graph, data):
    op = data.draw(st.integers(0, len(graph.durations_s) - 1))
    durations = list(graph.durations_s)
    durations[op] += data.draw(DURATIONS)
    slower = dataclasses.replace(graph, durations_s=tuple(durations))
    assert simulate(slower).makespan_s >= simulate(graph).makespan_s


@given(graphs(), st.integers(1, 4))
def test_contention_keeps_order_and_compute_capacity(graph, limit):
    free, contended = simulate(graph), simulate_reference(graph, max_concurrency=limit)
    assert contended.makespan_s >= free.makespan_s - 1e-9
    assert contended.makespan_s >= sum(graph.durations_s) / limit - 1e-9
    for ops in graph.node_ops:
        for before, after in itertools.pairwise(ops):
            assert contended.start_s[after] >= contended.end_s[before]
    for op, deps in enumerate(graph.depends_on):
        assert contended.end_s[op] - contended.start_s[op] >= graph.durations_s[op] - 1e-9
        assert all(contended.start_s[op] >= contended.end_s[dep] + graph.delays_s[dep] - 1e-9 for dep in deps)


def test_three_equal_operations_on_two_cores_share():
    graph = OpGraph(((0,), (1,), (2,)), (2.0, 2.0, 2.0), ((), (), ()))
    timeline = simulate_reference(graph, max_concurrency=2)
    assert timeline.end_s == pytest.approx((3.0, 3.0, 3.0))
    assert timeline.idle_frac == pytest.approx(0.0)


def test_a_node_of_two_processes_takes_two_cores():
    graph = OpGraph(((0,), (1,)), (2.0, 2.0), ((), ()), num_processes=(2, 1))
    assert simulate_reference(graph, max_concurrency=3).end_s == (2.0, 2.0)
    assert simulate_reference(graph, max_concurrency=2).end_s == pytest.approx((3.0, 3.0))


def test_chain_with_delay_and_idle_fraction():
    graph = OpGraph(((0,), (1,)), (1.0, 2.0), ((), (0,)), delays_s=(0.5, 0.5))
    timeline = simulate(graph)
    assert (timeline.start_s, timeline.makespan_s, timeline.busy_s) == ((0.0, 1.5), 3.5, (1.0, 2.0))
    assert timeline.idle_frac == pytest.approx(1 - 3.0 / 7.0)


@pytest.mark.parametrize("run", [simulate, simulate_reference])
def test_deadlock_names_the_operation(run):
    with pytest.raises(DeadlockError, match="operation 0 of node 0 waits"):
        run(OpGraph(((0,), (1,)), (1.0, 1.0), ((1,), (0,))))


def test_no_operations_take_no_time():
    assert simulate(OpGraph(((), ()), (), ())).makespan_s == 0.0
    assert simulate_reference(OpGraph(((), ()), (), ())).idle_frac == 0.0
