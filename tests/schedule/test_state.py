"""Moves keep what the search knows about an assignment: sums and largest items are those of the samples themselves."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.schedule import state as kernels
from dflop.schedule.linear import LinearStep
from dflop.schedule.state import State, Task, make_state, make_task
from tests.schedule.steps import linear_steps

ADD, TAKE, SWAP = (getattr(k, "py_func", k) for k in (kernels.add, kernels.take, kernels.swap_buckets))


@settings(max_examples=50)
@given(linear_steps(), st.data())
def test_after_any_moves_sums_and_largest_items_are_those_of_the_samples(step: LinearStep, data: st.DataObject):
    num_samples, num_buckets = len(step.tokens), step.num_slots * step.num_ranks
    buckets, samples = st.integers(0, num_buckets - 1), st.integers(0, num_samples - 1)
    where = data.draw(st.lists(buckets, min_size=num_samples, max_size=num_samples))
    task = make_task(step)
    state = make_state(task, np.array(where))
    for i, b in enumerate(where):
        ADD(task, state, i, b)
    moves = st.one_of(st.tuples(st.just("move"), samples, buckets), st.tuples(st.just("swap"), buckets, buckets))
    for kind, first, second in data.draw(st.lists(moves, max_size=8)):
        if kind == "move":
            TAKE(task, state, first, where[first])
            ADD(task, state, first, second)
            where[first] = second
        elif first != second:
            SWAP(task, state, first, second)
            where = [{first: second, second: first}.get(b, b) for b in where]
        check(task, state, np.array(where))


def check(task: Task, state: State, where) -> None:
    np.testing.assert_array_equal(state.bucket_of[state.content_of], where)
    for b in range(len(state.bucket_sum)):
        inside = np.flatnonzero(where == b)
        np.testing.assert_array_equal(state.bucket_sum[b], task.samples[inside].sum(axis=0))
        np.testing.assert_array_equal(state.bucket_largest_s[b], task.largest_s[inside].max(axis=0, initial=0.0))
    for k in range(task.num_slots):
        inside = np.flatnonzero(where // task.num_lanes == k)
        np.testing.assert_array_equal(state.slot_sum[k], task.samples[inside].sum(axis=0))
