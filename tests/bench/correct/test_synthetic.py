"""The main results of the synthetic bench, on fewer and smaller steps."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench.correct.balance import balanced, height_s
from tests.bench.correct.synthetic import EARLY, recovered, simulate
from tests.bench.correct.worlds import World

NUM_SAMPLES, NUM_STEPS, NOISE_FRAC = 256, EARLY.stop, 0.05
SEED = 0


@pytest.fixture(scope="module")
def world():
    return World(NUM_SAMPLES, SEED)


def runs_of(case, world, *names, num_steps=NUM_STEPS):
    return list(simulate(case, NOISE_FRAC, SEED, world, names, num_steps))


@pytest.mark.parametrize(
    "case", ["one LLM bucket 2x", "encoder top buckets 2x", "slow rank 1.5x", "bucket 2x and slow rank 1.5x"]
)
def test_most_of_what_a_misprediction_costs_is_recovered_within_twenty_steps(world, case):
    runs = runs_of(case, world, "none", "ours")
    assert runs[0].early_regret > 0.05
    assert recovered(runs, case, NOISE_FRAC, "ours") >= 0.85
    assert runs[1].num_switches == (case != "slow rank 1.5x")  # a slow rank needs no gate


def test_right_predictions_are_left_alone_and_the_gate_stays_off(world):
    (ours,) = runs_of("right", world, "ours", num_steps=60)
    assert max(ours.early_regret, ours.last_regret) <= 0.001
    assert ours.on_frac == 0.0


def test_a_level_that_is_off_needs_no_factors_by_size(world):
    (ours,) = runs_of("LLM 1.5x", world, "ours")
    assert ours.early_regret <= 0.002
    assert ours.on_frac == 0.0


def test_a_slow_rank_gets_less_and_no_search_is_worse_than_none():
    rng = np.random.default_rng(0)
    weights_s, tokens = rng.lognormal(0.0, 0.8, (64, 2)), rng.integers(1, 100, 64)
    slowness = np.array([1.0, 1.6])
    alike = balanced(weights_s, tokens, 8, np.ones(2))
    found = balanced(weights_s, tokens, 8, slowness)
    assert sorted(np.unique(found)) == list(range(8))
    assert height_s(weights_s, found, 8, slowness) < height_s(weights_s, alike, 8, slowness)
    # No slot can be below the average of all work at the pace of the ranks.
    pace = np.repeat([1.0, 1 / 1.6], 4).sum()
    assert height_s(weights_s, found, 8, slowness) <= 1.05 * max(
        weights_s[:, 1].sum() / pace, weights_s[:, 0].sum() / 8
    )
