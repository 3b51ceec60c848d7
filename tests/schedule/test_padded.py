"""Microbatches that are padded: exact cuts, caps, and what they gain."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.errors import ConfigError
from dflop.schedule.padded import balance_padded, padded_step_s
from tests.schedule.test_data_parallel import seconds


def arrival_s(s, num_ranks, num_slots, fixed_s, sync):
    bucket = np.arange(len(s)) * num_ranks * num_slots // len(s)
    return padded_step_s(s, bucket // num_ranks, bucket % num_ranks, num_ranks, num_slots, fixed_s, sync)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=30), st.integers(1, 4), st.integers(1, 3),
    st.sampled_from([0.0, 5.0]), st.sampled_from(["step", "microbatch"]),
)  # fmt: skip
def test_every_rank_has_work_and_it_is_never_worse_than_arrival(tokens, num_ranks, num_slots, fixed_s, sync):
    tokens = np.array(tokens)
    s = seconds(tokens)
    given = {"num_microbatches": num_slots, "fixed_s": fixed_s, "sync": sync}
    if len(s) < num_ranks * num_slots:
        with pytest.raises(ConfigError):
            balance_padded(s, tokens, num_ranks, **given)
        return
    found = balance_padded(s, tokens, num_ranks, **given)
    counts = np.bincount(found.slot * num_ranks + found.rank, minlength=num_ranks * num_slots)
    assert counts.min() >= 1
    assert len(counts) == num_ranks * num_slots
    assert found.lower_bound_s <= found.step_s <= arrival_s(s, num_ranks, num_slots, fixed_s, sync) + 1e-9


def test_all_samples_fit_into_one_microbatch_whatever_division_rounds():
    for num_samples in range(1, 60):
        tokens = np.full(num_samples, 15)
        found = balance_padded(seconds(tokens), tokens, 1, num_microbatches=1)
        assert found.num_microbatches == 1, num_samples
        assert found.step_s == pytest.approx(seconds(tokens).sum())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=3, max_size=9), st.integers(1, 3))
def test_with_one_microbatch_no_cut_of_the_sorted_samples_is_better(tokens, num_ranks):
    tokens = np.sort(np.array(tokens))[::-1]
    found = balance_padded(tokens.astype(float), tokens, num_ranks, num_microbatches=1)
    best = min(
        max(int(tokens[a]) * (b - a) for a, b in itertools.pairwise((0, *cuts, len(tokens))))
        for cuts in itertools.combinations(range(1, len(tokens)), num_ranks - 1)
    )
    assert found.step_s <= best * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=30), st.integers(1, 4), st.integers(300, 900))
def test_the_cap_holds_with_padding(tokens, num_ranks, cap):
    tokens = np.array(tokens)
    found = balance_padded(seconds(tokens), tokens, num_ranks, cap_tokens=cap)
    for bucket in set((found.slot * num_ranks + found.rank).tolist()):
        inside = tokens[found.slot * num_ranks + found.rank == bucket]
        assert len(inside) * inside.max() <= cap
