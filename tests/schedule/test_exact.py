from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.schedule.exact import exact_pack
from dflop.schedule.pack import Packing, bottleneck, pack, token_cap


def instance(seed: int, num_samples: int, modules: int):
    rng = np.random.default_rng(seed)
    return rng.lognormal(0.0, 0.6, (num_samples, modules)), rng.integers(1, 100, num_samples)


def brute_force(weights, tokens, num_buckets: int, cap: int) -> float:
    """Every assignment that keeps the cap."""
    best = np.inf
    for rest in itertools.product(range(num_buckets), repeat=len(weights) - 1):
        bucket = np.array((0, *rest))
        if np.bincount(bucket, tokens, num_buckets).max() <= cap:
            best = min(best, bottleneck(weights, bucket, num_buckets))
    return best


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 3), st.integers(1, 3), st.floats(1.0, 1.3))
def test_equals_trying_all_assignments(seed, buckets, modules, slack):
    weights, tokens = instance(seed, 10 if buckets == 2 else 7, modules)
    cap = int(token_cap(tokens, buckets) * slack)
    found = exact_pack(weights, tokens, buckets, cap_tokens=cap, deadline_s=60.0)
    assert found.is_optimal
    assert found.bottleneck_s == pytest.approx(brute_force(weights, tokens, buckets, cap), rel=2e-6)
    assert found.bottleneck_s == bottleneck(weights, np.array(found.bucket), buckets)
    assert np.bincount(found.bucket, tokens, buckets).max() <= cap


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 4), st.integers(1, 3))
def test_pack_is_within_a_percent_of_the_optimum_on_small_batches(seed, buckets, modules):
    weights, tokens = instance(seed, 4 * buckets, modules)
    cap = token_cap(tokens, buckets)
    packing = pack(weights, tokens, buckets, cap_tokens=cap, max_evals=1_000_000)
    exact = exact_pack(weights, tokens, buckets, cap_tokens=cap, deadline_s=60.0, max_nodes=2000, incumbent=packing)
    assert packing.lower_bound_s * (1 - 1e-12) <= exact.bottleneck_s <= packing.bottleneck_s
    if exact.is_optimal:
        assert packing.bottleneck_s <= exact.bottleneck_s * 1.01


def test_a_poor_incumbent_is_improved_and_survives_a_deadline_of_nothing():
    weights, tokens = instance(0, 10, 2)
    cap = int(tokens.sum())
    poor = Packing((0,) * 10, bottleneck(weights, np.zeros(10, dtype=np.int64), 3), 0.0, 0)
    late = exact_pack(weights, tokens, 3, cap_tokens=cap, deadline_s=0.0, incumbent=poor)
    assert (late.bucket, late.bottleneck_s, late.is_optimal) == (poor.bucket, poor.bottleneck_s, False)
    hurried = exact_pack(weights, tokens, 3, cap_tokens=cap, deadline_s=1e-6, incumbent=poor)
    assert hurried.bottleneck_s <= poor.bottleneck_s
    found = exact_pack(weights, tokens, 3, cap_tokens=cap, deadline_s=60.0, incumbent=poor)
    assert found.is_optimal
    alone = exact_pack(weights, tokens, 3, cap_tokens=cap, deadline_s=60.0)
    assert found.bottleneck_s == pytest.approx(alone.bottleneck_s)


def test_a_node_limit_gives_the_same_twice():
    weights, tokens = instance(3, 24, 3)
    cap = token_cap(tokens, 5)
    poor = pack(weights, tokens, 5, cap_tokens=cap, max_evals=0)
    first, second = (
        exact_pack(weights, tokens, 5, cap_tokens=cap, deadline_s=60.0, max_nodes=20, incumbent=poor) for _ in range(2)
    )
    assert first == second
    assert first.bottleneck_s < poor.bottleneck_s


def test_several_caps_are_kept():
    weights = np.array([[1.0], [1.0], [1.0], [1.0]])
    tokens = np.array([[1, 9], [1, 9], [1, 1], [1, 1]])
    found = exact_pack(weights, tokens, 2, cap_tokens=[4, 10], deadline_s=60.0)
    assert found.is_optimal
    assert found.bucket[0] != found.bucket[1]
