from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.schedule.pack import best_move, bottleneck, lower_bound, pack, token_cap, vector_lpt


@st.composite
def instances(draw: st.DrawFn, max_samples: int = 40):
    """(weights, tokens, num_buckets): up to three modules, some samples without work in some of them."""
    n, modules, buckets = draw(st.integers(1, max_samples)), draw(st.integers(1, 3)), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights = rng.lognormal(0.0, 1.0, (n, modules)) * (rng.random((n, modules)) < 0.7)
    weights[:, -1] += 0.01
    return weights, rng.integers(1, 1000, n), buckets


def optimum(weights, num_buckets: int) -> float:
    """Every assignment."""
    n = len(weights)
    return min(
        bottleneck(weights, np.array(buckets), num_buckets)
        for buckets in itertools.product(range(num_buckets), repeat=n)
    )


@settings(max_examples=60, deadline=None)
@given(instances())
def test_search_improves_on_lpt_keeps_the_cap_and_never_beats_the_bound(instance):
    weights, tokens, buckets = instance
    cap = token_cap(tokens, buckets)
    packing = pack(weights, tokens, buckets, cap_tokens=cap, max_evals=5000)
    assignment = np.array(packing.bucket)
    assert np.bincount(assignment, tokens, buckets).max() <= cap
    assert packing.bottleneck_s == bottleneck(weights, assignment, buckets)
    assert packing.bottleneck_s >= packing.lower_bound_s * (1 - 1e-12)
    assert packing.bottleneck_s <= bottleneck(weights, vector_lpt(weights, tokens, buckets, cap), buckets)
    assert packing.num_evals <= 5000 + len(tokens) * (len(tokens) + buckets)
    assert packing == pack(weights, tokens, buckets, cap_tokens=cap, max_evals=5000)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 3), st.integers(2, 3))
def test_bound_and_search_bracket_the_optimum(seed, modules, buckets):
    weights = np.random.default_rng(seed).lognormal(0.0, 0.7, (6, modules))
    tokens = np.ones(6, dtype=np.int64)
    best = optimum(weights, buckets)
    assert lower_bound(weights, buckets) <= best * (1 + 1e-12)
    found = pack(weights, tokens, buckets, cap_tokens=6, max_evals=100_000)
    assert best * (1 - 1e-12) <= found.bottleneck_s <= best * 1.05


def best_move_reference(weights, tokens, bucket, num_buckets, cap, worst):
    """Every move and swap, one at a time."""
    best = np.inf
    for i in np.flatnonzero(bucket == worst):
        changes = [[(i, b)] for b in range(num_buckets) if b != worst]
        changes += [[(i, bucket[j]), (j, worst)] for j in np.flatnonzero(bucket != worst)]
        for change in changes:
            after = bucket.copy()
            for sample, b in change:
                after[sample] = b
            touched = [worst, change[0][1]]
            if max(tokens[after == b].sum() for b in touched) <= cap:
                best = min(best, max(weights[after == b].sum(axis=0).max() for b in touched))
    return best


@settings(max_examples=40, deadline=None)
@given(instances(max_samples=12))
def test_best_move_equals_trying_them_all(instance):
    weights, tokens, buckets = instance
    if buckets == 1:
        return
    cap = token_cap(tokens, buckets)
    bucket = vector_lpt(weights, tokens, buckets, cap)
    worst = int(bucket[0])
    value, moves = best_move(weights, tokens, bucket, buckets, cap, worst)
    assert value == pytest.approx(best_move_reference(weights, tokens, bucket, buckets, cap, worst))
    if value < np.inf:
        after = bucket.copy()
        for sample, b in moves:
            after[sample] = b
        assert np.bincount(after, tokens, buckets).max() <= cap
        touched = [worst, moves[0][1]]
        assert max(weights[after == b].sum(axis=0).max() for b in touched) == pytest.approx(value)


def test_cap_binds_where_seconds_and_tokens_disagree():
    # By seconds alone the two long cheap samples would share a bucket.
    weights, tokens = np.array([[1.0], [1.0], [2.0]]), np.array([100, 100, 10])
    cap = token_cap(tokens, 2)
    assert cap == 132
    packing = pack(weights, tokens, 2, cap_tokens=cap, max_evals=1000)
    assert packing.bucket[0] != packing.bucket[1]
    assert pack(weights, tokens, 2, cap_tokens=300, max_evals=1000).bucket[0:2] in [(0, 0), (1, 1)]


def test_certificate_is_tight_at_realistic_size():
    rng = np.random.default_rng(1)
    weights = rng.lognormal(0.0, 0.8, (256, 2))
    packing = pack(weights, np.ones(256, dtype=np.int64), 32, cap_tokens=256, max_evals=2_000_000)
    assert packing.bottleneck_s <= packing.lower_bound_s * 1.01


def test_nothing_to_pack():
    assert pack(np.zeros((0, 2)), np.zeros(0, dtype=np.int64), 4, cap_tokens=0, max_evals=10).bucket == ()
