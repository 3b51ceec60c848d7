import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.correct.buckets import bucket_edges, bucket_of, typical_tokens

SIZES = st.lists(st.integers(1, 5000), min_size=1, max_size=200)


@given(SIZES, st.integers(1, 12))
def test_every_bucket_has_items_and_holds_about_its_share_of_the_seconds(sizes, num_buckets):
    tokens = np.array(sizes)
    seconds = tokens**1.5
    edges = bucket_edges(tokens, seconds, np.ones(len(tokens)), num_buckets)
    assert list(edges) == sorted(set(edges))
    assert len(edges) < num_buckets
    share = np.bincount(bucket_of(tokens, edges), weights=seconds, minlength=len(edges) + 1) / seconds.sum()
    assert len(share) == len(edges) + 1
    assert share.min() > 0
    # A bucket is off by no more than half of the sizes at its ends.
    largest = max(seconds[tokens == size].sum() for size in set(sizes)) / seconds.sum()
    assert share.max() <= 1 / num_buckets + largest + 1e-9 or len(edges) + 1 < num_buckets


def test_edges_are_where_buckets_begin():
    assert bucket_of(np.array([1, 9, 10, 11, 20, 99]), (10, 20)).tolist() == [0, 0, 1, 1, 2, 2]
    assert bucket_of(np.array([1, 99]), ()).tolist() == [0, 0]
    assert bucket_edges(np.full(50, 7), np.ones(50), np.ones(50)) == (), "one size is one bucket"
    assert bucket_edges(np.array([1, 2]), np.zeros(2), np.ones(2)) == ()


def test_samples_that_are_drawn_more_often_count_more():
    tokens = np.arange(1, 101)
    often = np.where(tokens <= 10, 1000.0, 1.0)
    alike, weighted = (bucket_edges(tokens, tokens * 1.0, w, 2) for w in (np.ones(100), often))
    assert alike == (pytest.approx(71, abs=1),)
    assert weighted[0] <= 11


@given(st.lists(st.integers(1, 5000), unique=True, max_size=12).map(sorted))
def test_a_typical_size_is_in_its_bucket(edges):
    assert bucket_of(typical_tokens(edges), edges).tolist() == list(range(len(edges) + 1))
