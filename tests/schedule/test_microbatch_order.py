from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflop.schedule.microbatch_order import order_slots

WEIGHTS = st.lists(st.integers(1, 100).map(float), min_size=1, max_size=7)


def cost_of(weights):
    """A made-up objective with many local optima, and a record of what was asked."""
    asked = []

    def makespan_s(order):
        asked.append(tuple(order))
        return sum((position * weights[k]) % 37 for position, k in enumerate(order))

    return makespan_s, asked


@given(WEIGHTS, st.integers(1, 60))
def test_never_worse_than_given_and_within_budget(weights, budget):
    makespan_s, asked = cost_of(weights)
    order, value = order_slots(makespan_s, weights, budget)
    assert len(asked) <= budget
    assert sorted(order) == list(range(len(weights)))
    given_order, _ = cost_of(weights)
    assert value == given_order(order) <= given_order(range(len(weights)))
