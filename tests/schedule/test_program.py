import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.schedule.linear import sample_weights
from dflop.schedule.policies import Effort, StepJob
from dflop.schedule.program import balance, bottleneck, solve
from tests.builders import LLM, make_cost, make_plan, random_batch


def brute_force(weights, tokens, caps, num_buckets: int) -> float:
    """The lowest bottleneck of every assignment that keeps the caps."""
    best = np.inf
    for rest in itertools.product(range(num_buckets), repeat=len(weights) - 1):
        bucket = np.array((0, *rest))
        if all((np.bincount(bucket, row, num_buckets) <= cap).all() for row, cap in zip(tokens.T, caps, strict=True)):
            best = min(best, bottleneck(weights, bucket, num_buckets))
    return best


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 3), st.integers(1, 3), st.integers(1, 2))
def test_equals_trying_all_assignments(seed, num_buckets, num_modules, num_caps):
    rng, n = np.random.default_rng(seed), 9 if num_buckets == 2 else 7
    weights, tokens = rng.lognormal(0.0, 0.6, (n, num_modules)), rng.integers(1, 100, (n, num_caps))
    caps = np.maximum(1.4 * tokens.sum(axis=0) / num_buckets, tokens.max(axis=0)).astype(np.int64)
    found = solve(weights, tokens, caps, np.zeros(n, dtype=np.int64), num_buckets, 60.0)
    best = brute_force(weights, tokens, caps, num_buckets)
    assert (found is None) == (best == np.inf)
    if found is not None:
        assert bottleneck(weights, found, num_buckets) == pytest.approx(best, rel=2e-6)
        assert (np.array([np.bincount(found, row, num_buckets).max() for row in tokens.T]) <= caps).all()


def test_the_policy_balances_no_worse_than_longest_first_and_falls_back_to_it_without_time():
    plan = make_plan({"vision": 2, LLM: 2}, num_microbatches=2)
    job = StepJob(plan, random_batch(16, encoders=("vision",), seed=1), make_cost("vision"))
    first, found = (job.assign(policy, Effort()) for policy in ("bottleneck", "program"))
    weights = sample_weights(job.linear)
    buckets = [a.slot * 2 + a.rank for a in (first, found)]
    assert bottleneck(weights, buckets[1], 4) < bottleneck(weights, buckets[0], 4)
    assert balance(job.linear, buckets[0], 0.0).tolist() == buckets[0].tolist()
