import math

import numpy as np
import pytest

from dflop.correct.nodes import NodeFactors


def observe(found, rng, slowness, steps, noise=0.02, common=1.0):
    """Steps of one module on as many ranks as `slowness` has entries."""
    for _ in range(steps):
        found.observe(
            {
                ("llm", 0, rank): (math.log(common * slow) + rng.normal(0.0, noise), noise)
                for rank, slow in enumerate(slowness)
            }
        )
    return found


def in_force(found, num):
    beliefs = found.beliefs()
    return [beliefs["llm", 0, rank].in_force for rank in range(num)]


def is_slow(found):
    return [node[2] for node, belief in found.beliefs().items() if belief.is_slow]


def test_a_slow_rank_is_named_after_some_steps_and_no_longer_when_it_is_over():
    rng, slowness = np.random.default_rng(0), (1.0, 1.0, 1.4, 1.0)
    found = observe(NodeFactors(), rng, slowness, 3)
    assert is_slow(found) == []
    assert in_force(found, 4) == [1.0, 1.0, pytest.approx(1.4, rel=0.05), 1.0]
    observe(found, rng, slowness, 5)
    assert is_slow(found) == [2]
    observe(found, rng, (1.0,) * 4, 6)
    assert is_slow(found) == []
    assert in_force(found, 4) == [1.0] * 4


@pytest.mark.parametrize(
    ("slowness", "common", "factors", "slow"),
    [
        ((1.0,) * 4, 1.8, [1.0] * 4, []),  # what all have in common is nobody's fault
        ((1.5, 1.0), 1.0, [1.5, 1.0], [0]),  # of two the slower is slow
        ((1.0, 0.7, 1.0, 1.0), 1.0, [1.0, 0.7, 1.0, 1.0], []),  # a fast rank is given more and is not slow
    ],
)
def test_ranks_are_compared_with_their_peers(slowness, common, factors, slow):
    found = observe(NodeFactors(), np.random.default_rng(0), slowness, 10, common=common)
    assert in_force(found, len(slowness)) == [1.0 if f == 1.0 else pytest.approx(f, rel=0.05) for f in factors]
    assert is_slow(found) == slow
    assert observe(NodeFactors(), np.random.default_rng(0), (2.0,), 10).beliefs() == {}, "one rank has no peers"


def test_noise_names_nobody():
    for seed in range(4):
        found, rng = NodeFactors(), np.random.default_rng(seed)
        for _ in range(60):
            observe(found, rng, (1.0,) * 16, 1, noise=0.05)
            assert is_slow(found) == []
            assert in_force(found, 16) == [1.0] * 16


def test_one_slow_step_means_nothing():
    rng = np.random.default_rng(0)
    found = observe(NodeFactors(), rng, (1.0,) * 4, 20)
    observe(found, rng, (1.0, 3.0, 1.0, 1.0), 1)
    assert in_force(found, 4) == [1.0] * 4
    observe(found, rng, (1.0, 3.0, 1.0, 1.0), 3)
    assert in_force(found, 4)[1] == pytest.approx(3.0, rel=0.1)
