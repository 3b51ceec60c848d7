import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.schedule.linear import LinearStep, Part
from dflop.schedule.place import SLOTS, place
from dflop.schedule.rank_kernel import BLOCK
from dflop.schedule.state import make_task
from tests.schedule.steps import keeps_caps, linear_steps


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


@pytest.mark.budget(60, "a kernel that is compiled where nothing was warmed")
@settings(max_examples=60, deadline=None)
@given(linear_steps(), st.data())
def test_compiled_placing_follows_its_rule(step, data):
    sizes = np.array(
        data.draw(st.lists(st.sampled_from([0.25, 0.5, 1.0]), min_size=step.num_slots, max_size=step.num_slots))
    )
    wanted, found = place_slowly(step, sizes), next(place(make_task(step), [sizes])).tolist()
    if wanted is not None:
        assert found == wanted
        assert keeps_caps(step, found)


@pytest.mark.parametrize(
    ("num_ranks", "num_slots"), [(BLOCK - 1, 3), (2 * BLOCK, 3), (2 * BLOCK + 5, 3), (1, 4 * SLOTS), (2, 2 * SLOTS + 5)]
)
def test_ranks_and_slots_that_are_passed_over_could_not_have_won(num_ranks, num_slots):
    rng, num = np.random.default_rng(num_ranks), 400
    chain_s, slowness = rng.integers(1, 80, (2, num)) / 8, rng.choice([1.0, 1.25], (2, num_ranks))
    step = LinearStep(
        num_slots=num_slots, num_ranks=num_ranks, chain_s=chain_s, chain_slowness=slowness, slot_s=np.zeros((0, num)),
        largest_s=np.zeros((0, num)), tokens=np.ones(num, dtype=np.int64), num_items=np.zeros((0, num), dtype=np.int64),
        pipe_pp=np.array([2]), stage_parts=((Part(0, 0.0, 0.5),), (Part(1, 0.0, 0.5),)), num_after=np.array([1, 0]),
        cap_tokens=num, window=1, cap_in_flight_tokens=num, media_tokens=np.zeros((0, num), dtype=np.int64),
        cap_media_tokens=np.zeros(0, dtype=np.int64), on_chain=np.zeros(0, dtype=np.bool_),
    )  # fmt: skip
    sizes = np.resize([0.5, 1.0, 0.75], num_slots)
    sums, expected = np.zeros((2, num_slots * num_ranks)), np.zeros(num, dtype=int)
    for i in np.argsort(-(chain_s.max(axis=0) + 0.25 * chain_s.sum(axis=0)), kind="stable"):
        own = ((sums + chain_s[:, i, None]) * np.tile(slowness, num_slots)).max(axis=0)
        expected[i] = np.argmin((own + 1e-3 * own) / np.repeat(sizes, num_ranks))
        sums[:, expected[i]] += chain_s[:, i]
    assert (next(place(make_task(step), [sizes])) == expected).all()
