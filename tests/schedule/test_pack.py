from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.schedule.bound import lower_bound
from dflop.schedule.pack import bottleneck, pack, token_cap, token_lpt, vector_lpt
from dflop.simulate.jit import IS_COMPILED

only_compiled = pytest.mark.skipif(not IS_COMPILED, reason="there is no second half to compare with")


@st.composite
def instances(draw: st.DrawFn, max_samples: int = 40):
    """(weights, tokens, num_buckets): up to three modules, some samples without work in some of them, some in none."""
    n, modules = draw(st.integers(1, max_samples)), draw(st.integers(1, 3))
    buckets = draw(st.integers(1, max(2, n // 3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights = rng.lognormal(0.0, 1.0, (n, modules)) * (rng.random((n, modules)) < 0.7)
    if draw(st.booleans()):
        weights = np.round(weights * 8) / 8  # many equal ones
    return weights, rng.integers(0, 1000, n), buckets


@st.composite
def tight_instances(draw: st.DrawFn):
    """As `instances`, without a sample that alone decides: the search goes through all its moves."""
    n = draw(st.integers(9, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights = rng.integers(1, 9, (n, draw(st.integers(2, 3)))) / 8 + rng.random((n, 1)) * draw(st.integers(0, 1))
    return weights, rng.integers(0, 1000, n), draw(st.integers(3, n // 3))


@settings(max_examples=60, deadline=None)
@given(instances() | tight_instances())
def test_search_improves_on_lpt_keeps_the_cap_and_never_beats_the_bound(instance):
    weights, tokens, buckets = instance
    cap = token_cap(tokens, buckets)
    packing = pack(weights, tokens, buckets, cap_tokens=cap, max_evals=5000)
    assignment = np.array(packing.bucket)
    assert np.bincount(assignment, tokens, buckets).max() <= cap
    assert packing.bottleneck_s == bottleneck(weights, assignment, buckets)
    assert packing.bottleneck_s >= packing.lower_bound_s * (1 - 1e-12)
    lpt = vector_lpt(weights, tokens, buckets, cap)
    assert packing.bottleneck_s <= bottleneck(weights, lpt, buckets) * (1 + 1e-12)
    assert packing.num_evals <= 5000
    assert packing == pack(weights, tokens, buckets, cap_tokens=cap, max_evals=5000)


@only_compiled
@settings(max_examples=80, deadline=None)
@given(instances() | tight_instances(), st.integers(0, 3), st.sampled_from([0, 500, 10_000]), st.floats(0.3, 1.0))
def test_both_halves_find_the_same_assignment(instance, num_more_caps, max_evals, tightness):
    weights, tokens, buckets = instance
    rng = np.random.default_rng(len(tokens))
    more = rng.integers(0, 100, (len(tokens), num_more_caps))
    caps = [token_cap(tokens, buckets), *np.maximum(tightness * more.sum(axis=0), more.max(axis=0)).astype(int)]
    kinds = np.column_stack([tokens, more])
    compiled, plain = (
        pack(weights, kinds, buckets, cap_tokens=caps, max_evals=max_evals, tolerance=0.0, compiled=compiled)
        for compiled in (True, False)
    )
    assert compiled == plain
    assert np.bincount(plain.bucket, tokens, buckets).max() <= caps[0]
    assert np.array_equal(
        vector_lpt(weights, tokens, buckets, caps[0], compiled=True),
        vector_lpt(weights, tokens, buckets, caps[0], compiled=False),
    )
    assert np.array_equal(token_lpt(tokens, buckets, compiled=True), token_lpt(tokens, buckets, compiled=False))


@settings(max_examples=25, deadline=None)
@given(instances(max_samples=20), st.integers(1, 2))
def test_several_caps_are_kept_where_they_leave_room(instance, num_more_caps):
    weights, tokens, buckets = instance
    more = np.random.default_rng(0).integers(1, 100, (len(tokens), num_more_caps))
    kinds = np.column_stack([tokens, more])
    caps = [token_cap(column, buckets) for column in kinds.T]
    caps[1:] = [cap + int(column.max()) for cap, column in zip(caps[1:], more.T, strict=True)]
    packing = pack(weights, kinds, buckets, cap_tokens=caps, max_evals=5000)
    filled = np.array([np.bincount(packing.bucket, column, buckets).max() for column in kinds.T])
    assert filled[0] <= caps[0]
    shares = kinds / np.maximum(caps, 1)
    seed = vector_lpt(shares, np.zeros(len(tokens), dtype=np.int64), buckets, 0)
    if bottleneck(shares, seed, buckets) <= 1:
        assert (filled <= caps).all()


def test_bound_sees_samples_that_clash_in_different_modules():
    # Two long films, which fill the encoder; two long texts with a picture each. Averages and mixtures allow 1.0.
    weights = np.array([[0.9, 0.3], [0.9, 0.3], [0.3, 0.9], [0.3, 0.9]])
    assert lower_bound(weights, 3) == pytest.approx(1.2)
    assert lower_bound(weights, 4) == pytest.approx(0.9)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=60), st.integers(1, 12))
def test_token_cap_allows_lpt_on_tokens_and_a_quarter_above_the_average(lengths, buckets):
    tokens = np.array(lengths)
    largest = np.bincount(token_lpt(tokens, buckets), tokens, buckets).max()
    assert token_cap(tokens, buckets) == max(np.ceil(1.25 * tokens.sum() / buckets), largest)


def test_token_lpt_gives_the_next_longest_to_the_emptiest():
    assert token_lpt(np.array([5, 1, 4, 3, 2]), 2).tolist() == [0, 0, 1, 1, 0]
    assert token_lpt(np.zeros(3, dtype=np.int64), 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("modules", [1, 2, 3])
def test_certificate_is_tight_at_realistic_size(modules):
    rng = np.random.default_rng(1)
    weights = rng.lognormal(0.0, 0.8, (512, 1)) * rng.uniform(0.8, 1.0, (512, modules))
    packing = pack(weights, np.ones(512, dtype=np.int64), 32, cap_tokens=512, max_evals=1_000_000)
    assert packing.bottleneck_s <= packing.lower_bound_s * 1.001 * (1 + 1e-12)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0])
def test_seconds_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match="finite"):
        pack(np.array([[1.0], [wrong]]), np.ones(2, dtype=np.int64), 2, cap_tokens=2, max_evals=10)


def test_nothing_to_pack():
    assert pack(np.zeros((0, 2)), np.zeros(0, dtype=np.int64), 4, cap_tokens=0, max_evals=10).bucket == ()
