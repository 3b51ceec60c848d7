from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dflop.schedule.order import order_slots
from dflop.schedule.split import split_lpt

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


@given(WEIGHTS)
def test_ends_in_an_order_no_swap_improves(weights):
    makespan_s, _ = cost_of(weights)
    order, value = order_slots(makespan_s, weights, 10_000)
    for i, j in itertools.combinations(range(len(order)), 2):
        swapped = list(order)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        assert makespan_s(swapped) >= value


@given(st.lists(st.integers(1, 50).map(float), max_size=9), st.integers(1, 3))
def test_lpt_split_is_complete_and_within_four_thirds(seconds, num_ranks):
    owned = split_lpt(range(len(seconds)), seconds, num_ranks)
    assert sorted(i for part in owned for i in part) == list(range(len(seconds)))
    slowest = max(sum(seconds[i] for i in part) for part in owned)
    average, longest = sum(seconds) / num_ranks, max(seconds, default=0.0)
    assert slowest <= max(average, longest) * 2
    if len(seconds) <= 6:
        best = min(
            max(sum(s for s, r in zip(seconds, ranks, strict=True) if r == rank) for rank in range(num_ranks))
            for ranks in itertools.product(range(num_ranks), repeat=len(seconds))
        )
        assert slowest <= best * 4 / 3 + 1e-9
