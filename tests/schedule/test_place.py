import dataclasses
import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.schedule.place import place, split_items, split_under_cap
from dflop.schedule.state import make_task
from tests.schedule.steps import keeps_caps, linear_steps

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


def place_slowly(step, sizes):
    """The rule of `place`, one sum at a time."""
    places = list(itertools.product(range(step.num_slots), range(step.num_ranks)))

    def score_of(k, r, i):
        in_slot = [j for j in [*bucket, i] if bucket.get(j, (k, r))[0] == k]
        mine = [j for j in in_slot if bucket.get(j, (k, r)) == (k, r)]
        own = max(sum(row[j] for j in mine) * of[r] for row, of in zip(step.chain_s, step.chain_slowness, strict=True))
        shared = max(
            (
                max(total[in_slot].sum(), one[in_slot].max())
                for total, one in zip(step.slot_s, step.largest_s, strict=True)
            ),
            default=0.0,
        )
        return (max(own, shared) + 1e-3 * (own + shared)) / sizes[k]

    def is_within(b, i):
        some = [*bucket, i]
        part = dataclasses.replace(step, tokens=step.tokens[some], media_tokens=step.media_tokens[:, some])
        return keeps_caps(part, [k * step.num_ranks + r for k, r in (*bucket.values(), b)])

    weights = np.concatenate([step.chain_s, step.num_ranks * step.slot_s])
    order = np.argsort(-(weights.max(axis=0) + 0.25 * weights.sum(axis=0)), kind="stable")
    bucket: dict[int, tuple[int, int]] = {}
    for i in order.tolist():
        used = {b: sum(int(step.tokens[j]) for j in bucket if bucket[j] == b) for b in places}
        # What is over a cap already is not made worse by a sample that goes elsewhere.
        fitting = [b for b in places if is_within(b, i)]
        if fitting:
            bucket[i] = min(fitting, key=lambda b: (round(score_of(*b, i), 12), b))
        else:
            bucket[i] = min(places, key=lambda b: (used[b], b))
            if not is_within(bucket[i], i):
                return None
    return [bucket[i][0] * step.num_ranks + bucket[i][1] for i in range(len(order))]


@settings(max_examples=60, deadline=None)
@given(linear_steps(), st.data())
def test_compiled_placing_follows_its_rule(step, data):
    sizes = np.array(
        data.draw(st.lists(st.sampled_from([0.25, 0.5, 1.0]), min_size=step.num_slots, max_size=step.num_slots))
    )
    wanted, found = place_slowly(step, sizes), place(make_task(step), sizes).tolist()
    if wanted is not None:
        assert found == wanted
        assert keeps_caps(step, found)


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
