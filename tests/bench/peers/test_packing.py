"""Re-expressed peers have the properties that their descriptions state, and find what text books say they find."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.peers.packing import VERL_LINEAR, first_fit_decreasing, fitted_first_fit, verl_microbatches
from tests.bench.schedule.rivals import differencing

lengths = st.lists(st.integers(1, 500), min_size=1, max_size=40)


def test_first_fit_decreasing_of_the_text_book():
    tokens = np.array([4, 8, 1, 4, 2, 1])
    assert first_fit_decreasing(tokens, 10).tolist() == [1, 0, 1, 1, 0, 1]


@given(lengths, st.integers(500, 900))
def test_first_fit_decreasing_is_the_plain_loop(sizes, capacity):
    bins: list[list[int]] = []
    expected = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        home = next(
            (b for b, members in enumerate(bins) if sum(sizes[j] for j in members) + sizes[i] <= capacity), None
        )
        if home is None:
            home = len(bins)
            bins.append([])
        bins[home].append(i)
        expected[i] = home
    assert first_fit_decreasing(np.array(sizes), capacity).tolist() == expected


@given(st.lists(st.integers(1, 500), min_size=1, max_size=6), st.integers(500, 900))
def test_first_fit_needs_at_most_eleven_ninths_of_the_fewest_bins_and_six_ninths(sizes, capacity):
    """Dosa 2007."""
    fewest = next(
        num_bins
        for num_bins in range(1, len(sizes) + 1)
        for bins in itertools.product(range(num_bins), repeat=len(sizes))
        if max(sum(s for s, b in zip(sizes, bins, strict=True) if b == k) for k in range(num_bins)) <= capacity
    )
    assert int(first_fit_decreasing(np.array(sizes), capacity).max()) + 1 <= 11 / 9 * fewest + 6 / 9


def test_a_sample_longer_than_the_bin_is_refused():
    with pytest.raises(ValueError, match="a sample of 11 tokens fits in no bin of 10"):
        first_fit_decreasing(np.array([3, 11]), 10)


@given(lengths, st.integers(1, 12))
def test_fitted_bins_are_enough_and_about_as_small_as_can_be(sizes, num_bins):
    tokens = np.array(sizes)
    bins = fitted_first_fit(tokens, num_bins)
    assert bins.max() < num_bins
    loads = np.bincount(bins, tokens, num_bins)
    least = max(tokens.max(), tokens.sum() / num_bins)
    assert loads.max() <= 2 * np.ceil(least)
    assert loads.sum() == tokens.sum()


@given(lengths, st.integers(1, 6))
def test_differencing_with_equal_counts_has_equal_counts(sizes, num_buckets):
    cost = np.array(sizes[: len(sizes) // num_buckets * num_buckets], dtype=float)
    if not len(cost):
        return
    counts = np.bincount(differencing(cost, num_buckets, equal_counts=True), minlength=num_buckets)
    assert set(counts.tolist()) == {len(cost) // num_buckets}


@given(st.lists(st.integers(1, 100), min_size=2, max_size=10))
def test_differencing_into_two_is_within_seven_sixths_of_the_best(sizes):
    """Fischetti and Martello 1987."""
    cost = np.array(sizes, dtype=float)
    found = np.bincount(differencing(cost, 2), cost, 2).max()
    best = min(
        max(cost[list(part)].sum(), cost.sum() - cost[list(part)].sum())
        for size in range(len(sizes) + 1)
        for part in itertools.combinations(range(len(sizes)), size)
    )
    assert found <= 7 / 6 * best + 1e-9


def test_counts_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="5 samples do not divide into 2 buckets"):
        differencing(np.ones(5), 2, equal_counts=True)


@given(lengths, st.integers(1, 4), st.integers(1, 5))
def test_small_microbatches_stand_at_both_ends(sizes, num_ranks, num_slots):
    tokens = np.array(sizes)
    slot, rank = verl_microbatches(tokens, num_slots, num_ranks)
    assert 0 <= slot.min() <= slot.max() < num_slots
    assert 0 <= rank.min() <= rank.max() < num_ranks
    if len(tokens) % num_ranks == 0:
        assert len(set(np.bincount(rank, minlength=num_ranks).tolist())) == 1
    work = VERL_LINEAR * tokens + tokens.astype(float) ** 2
    for r in range(num_ranks):
        loads = np.bincount(slot[rank == r], work[rank == r], num_slots)
        top = int(loads.argmax())
        assert (np.diff(loads[: top + 1]) >= 0).all()
        assert (np.diff(loads[top:]) <= 0).all()
