import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflop.schedule.assignment import split_items, split_under_cap

SECONDS = st.lists(st.integers(1, 50).map(float), max_size=9)


def split_lpt(weights, slowness):
    """Rank of every item of a slot."""
    more, loads, rank = slowness - slowness.min(), np.zeros(len(slowness)), [0] * len(weights)
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        rank[item] = int(np.argmin(loads + weights[item] * more))
        loads[rank[item]] += weights[item] * slowness[rank[item]]
    return rank


@given(SECONDS, st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))
def test_compiled_split_equals_the_readable_one_in_every_slot(seconds, num_slots, num_ranks, seed):
    rng = np.random.default_rng(seed)
    slot, slowness = rng.integers(num_slots, size=len(seconds)), rng.choice([1.0, 1.3, 2.0], num_ranks)
    found = split_items(slot, np.array(seconds), num_slots, num_ranks, slowness)
    for k in range(num_slots):
        inside = np.flatnonzero(slot == k)
        assert found[inside].tolist() == split_lpt(np.array(seconds)[inside], slowness)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50), st.integers(1, 50)), max_size=12),
    st.integers(1, 3),
    st.integers(1, 100),
)
def test_tokens_decide_only_in_slots_where_seconds_would_break_the_cap(rows, num_ranks, cap):
    slot, seconds, tokens = (np.array([r[c] for r in rows], dtype=np.int64) for c in range(3))
    by_seconds, by_tokens = (split_items(slot, w.astype(float), 3, num_ranks) for w in (seconds, tokens))
    found = split_under_cap(slot, seconds.astype(float), tokens, 3, num_ranks, cap_tokens=cap)
    for k in range(3):
        mine = slot == k
        largest = np.bincount(by_seconds[mine], tokens[mine], num_ranks).max()
        assert found[mine].tolist() == (by_seconds if largest <= cap else by_tokens)[mine].tolist()
