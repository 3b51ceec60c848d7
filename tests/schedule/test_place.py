from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.records import LLM
from dflop.schedule.linear import linear_step
from dflop.schedule.place import place, split_items, split_lpt
from tests.builders import make_cost, make_plan, random_batch
from tests.schedule.steps import linear_steps

SECONDS = st.lists(st.integers(1, 50).map(float), max_size=9)


@given(SECONDS, st.integers(1, 3))
def test_split_is_within_four_thirds_of_the_best(seconds, num_ranks):
    rank = split_lpt(np.array(seconds), num_ranks)
    slowest = max(sum(s for s, r in zip(seconds, rank, strict=True) if r == k) for k in range(num_ranks))
    if len(seconds) <= 6:
        best = min(
            max(sum(s for s, r in zip(seconds, ranks, strict=True) if r == rank) for rank in range(num_ranks))
            for ranks in itertools.product(range(num_ranks), repeat=len(seconds))
        )
        assert slowest <= best * 4 / 3 + 1e-9


@given(SECONDS, st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))
def test_compiled_split_equals_the_readable_one_in_every_slot(seconds, num_slots, num_ranks, seed):
    slot = np.random.default_rng(seed).integers(num_slots, size=len(seconds))
    found = split_items(slot, np.array(seconds), num_slots, num_ranks)
    for k in range(num_slots):
        inside = np.flatnonzero(slot == k)
        assert found[inside].tolist() == split_lpt(np.array(seconds)[inside], num_ranks)


def place_slowly(step, sizes):
    """The rule of `place`, one sum at a time."""

    def score_of(members, k, r, i):
        with_i = {*members, i}
        in_slot = [j for j in with_i if bucket.get(j, (k, r))[0] == k]
        mine = [j for j in with_i if bucket.get(j, (k, r)) == (k, r)]
        own = max(sum(row[j] for j in mine) for row in step.chain_s)
        shared = max((sum(row[j] for j in in_slot) for row in step.slot_s), default=0.0)
        return (max(own, shared) + 1e-3 * (own + shared)) / sizes[k]

    weights = np.concatenate([step.chain_s, step.num_ranks * step.slot_s])
    order = np.argsort(-(weights.max(axis=0) + 0.25 * weights.sum(axis=0)), kind="stable")
    bucket: dict[int, tuple[int, int]] = {}
    for i in order.tolist():
        places = list(itertools.product(range(step.num_slots), range(step.num_ranks)))
        used = {b: sum(int(step.tokens[j]) for j in bucket if bucket[j] == b) for b in places}
        fitting = [b for b in places if used[b] + step.tokens[i] <= step.cap_tokens]
        if fitting:
            bucket[i] = min(fitting, key=lambda b: (round(score_of(bucket, *b, i), 12), b))
        else:
            bucket[i] = min(places, key=lambda b: (used[b], b))
    return [bucket[i][0] * step.num_ranks + bucket[i][1] for i in range(len(order))]


@settings(max_examples=60, deadline=None)
@given(linear_steps(), st.data())
def test_compiled_placing_follows_its_rule(step, data):
    sizes = np.array(
        data.draw(st.lists(st.sampled_from([0.25, 0.5, 1.0]), min_size=step.num_slots, max_size=step.num_slots))
    )
    assert place(step, sizes).tolist() == place_slowly(step, sizes)


def test_larger_slots_take_more():
    plan = make_plan({"vision": 1, LLM: 1}, num_microbatches=4)
    batch = random_batch(200, encoders=("vision",), seed=2)
    step = linear_step(plan, items_of(plan, batch), make_cost("vision").extrapolating())
    bucket = place(step, np.array([0.25, 1.0, 1.0, 0.5]))
    seconds = np.bincount(bucket, step.chain_s[0], 4)
    assert seconds[0] < seconds[3] < seconds[1]


def items_of(plan, batch):
    from dflop.schedule.items import module_items

    return {m.module: module_items(batch, m.module) for m in plan.modules}
