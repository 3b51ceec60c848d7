import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.schedule.pack import over_ranks, partition, token_cap, token_lpt

WEIGHTS = st.lists(st.integers(0, 50), min_size=1, max_size=9)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=60), st.integers(1, 12))
def test_token_cap_allows_lpt_on_tokens_and_a_quarter_above_the_average(lengths, buckets):
    tokens = np.array(lengths)
    largest = np.bincount(token_lpt(tokens, buckets), tokens, buckets).max()
    assert token_cap(tokens, buckets) == max(np.ceil(1.25 * tokens.sum() / buckets), largest)


def test_token_lpt_gives_the_next_longest_to_the_emptiest():
    assert token_lpt(np.array([5, 1, 4, 3, 2]), 2).tolist() == [0, 0, 1, 1, 0]
    assert token_lpt(np.zeros(3, dtype=np.int64), 3).tolist() == [0, 0, 0]


@given(WEIGHTS, st.integers(1, 4))
def test_parts_are_within_a_third_of_the_best_of_all(weights, num_parts):
    found = partition(np.array(weights), num_parts)
    heaviest = np.bincount(found, weights, num_parts).max()
    every = itertools.product(range(num_parts), repeat=len(weights)) if len(weights) < 7 else [found]
    best = min(np.bincount(np.array(p), weights, num_parts).max() for p in every)
    assert best <= heaviest <= 4 / 3 * best
    assert heaviest == np.bincount(found, weights, num_parts)[0]


def test_two_parts_as_in_the_paper_of_the_method():
    assert np.bincount(partition(np.array([8, 7, 6, 5, 4]), 2), [8, 7, 6, 5, 4]).tolist() == [16, 14]


def test_many_lengths_are_balanced_far_better_than_longest_first():
    lengths = np.random.default_rng(0).lognormal(7, 1, 512).astype(int)
    loads = np.bincount(partition(lengths, 16), lengths)
    assert loads.max() / loads.mean() == pytest.approx(1, abs=1e-3)
    slot, rank = over_ranks(lengths, 16, 4)
    assert np.bincount(slot * 16 + rank, minlength=64).min() > 0
    cells = np.bincount(slot * 16 + rank, lengths, 64).reshape(4, 16)
    assert (np.diff(cells, axis=0) <= 0).all(), "heavy slots are side by side"
