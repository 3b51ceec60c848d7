"""The filter against the textbook, and what it does that the textbook does not."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.correct.filter import FactorFilter, Step, common_mean, fitted, hierarchical

NUM = 6


def dense_update(mean, cov, expected_s, measured_s, variance):
    """Kalman's update as it is usually written, with the covariance of all measurements."""
    noise_cov = np.diag(variance) if np.ndim(variance) == 1 else variance
    innovation_cov = expected_s @ cov @ expected_s.T + noise_cov
    gain = cov @ expected_s.T @ np.linalg.inv(innovation_cov)
    mean = mean + gain @ (measured_s - expected_s @ mean)
    return mean, (np.eye(len(mean)) - gain @ expected_s) @ cov


def loads(rng, num):
    return 0.1 * rng.dirichlet(np.full(NUM, 0.4), num) * rng.uniform(0.5, 2.0, (num, 1))


def new_filter():
    prior = hierarchical(NUM, 0.3, 0.4)
    return FactorFilter(np.ones(NUM), prior, prior, hierarchical(NUM, 0.01, 0.005))


def alone(num):
    """All microbatches are one rank's."""
    return np.zeros(num, dtype=np.int64)


def update(found, expected_s, measured_s, shared_var=0.0):
    found.update(expected_s, measured_s, alone(len(measured_s)), shared_var)


def run(found, rng, truth, steps, noise_frac=0.05, num=32):
    for _ in range(steps):
        expected_s = loads(rng, num)
        update(found, expected_s, expected_s @ truth * rng.normal(1.0, noise_frac, num))
    return found


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 4), st.sampled_from([0.0, 0.001, 0.02]))
def test_a_fit_equals_the_textbook_with_what_ranks_share_written_out(seed, num, num_ranks, shared_var):
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(NUM, NUM))
    cov, mean = root @ root.T / NUM + 0.01 * np.eye(NUM), rng.uniform(0.5, 2.0, NUM)
    expected_s, rank = loads(rng, num), rng.integers(0, num_ranks, num)
    measured_s, load_s = expected_s @ rng.uniform(0.5, 2.0, NUM), expected_s.sum(axis=1)
    own_var = 100.0  # so much that Huber's function weighs nothing less
    ours = fitted(Step(expected_s, measured_s, load_s, rank, num_ranks, 1e5 * shared_var), own_var, mean, cov)
    is_same = rank[:, None] == rank
    noise_cov = np.diag(own_var * load_s**2) + 1e5 * shared_var * is_same * np.outer(load_s, load_s)
    theirs = dense_update(mean, cov, expected_s, measured_s, noise_cov)
    assert ours.mean == pytest.approx(theirs[0], rel=1e-6, abs=1e-8)
    assert ours.cov == pytest.approx(theirs[1], rel=1e-5, abs=1e-8)


def test_one_slow_step_moves_a_level_only_as_far_as_steps_stray():
    """Thirty microbatches that agree are no proof where all of a rank's share an error."""
    expected_s = loads(np.random.default_rng(5), 32)
    moved = []
    for shared_var in (0.0, 0.1**2):
        found = run(new_filter(), np.random.default_rng(6), np.ones(NUM), 20)
        before = common_mean(found.mean, found.cov)[0]
        update(found, expected_s, 1.1 * expected_s.sum(axis=1), shared_var)
        moved.append(common_mean(found.mean, found.cov)[0] - before)
    assert moved[1] < 0.02 < 0.04 < moved[0]


def test_what_tells_sizes_apart_is_worth_the_same_whatever_ranks_share():
    """A bucket against the others is seen within every rank, so a shared error does not hide it."""
    truth = np.array([1.0, 1.0, 2.0, 1.0, 1.0, 1.0])
    found, rng, rank = new_filter(), np.random.default_rng(7), np.arange(32) % 2
    for _ in range(40):
        expected_s = loads(rng, 32)
        shared = rng.normal(1.0, 0.1, 2)[rank]
        found.update(expected_s, expected_s @ truth * shared * rng.normal(1.0, 0.03, 32), rank, 0.1**2)
    assert found.mean / found.mean[[0, 1, 3, 4, 5]].mean() == pytest.approx(truth, abs=0.12)
    assert found.state()["noise_var"] ** 0.5 == pytest.approx(0.03, rel=0.4)


@pytest.mark.parametrize("noise_frac", [0.02, 0.05, 0.15])
def test_factors_and_noise_are_found(noise_frac):
    truth = np.array([1.0, 1.0, 2.0, 1.0, 0.7, 1.0])
    found = run(new_filter(), np.random.default_rng(0), truth, 40, noise_frac)
    assert np.abs(found.mean - truth).max() < 4 * np.sqrt(np.diag(found.cov)).max()
    assert np.abs(found.mean - truth).max() < 1.5 * noise_frac
    assert found.state()["noise_var"] ** 0.5 == pytest.approx(noise_frac, rel=0.25)


def test_a_sudden_change_is_followed_within_steps_and_noise_is_not():
    rng = np.random.default_rng(2)
    truth = np.ones(NUM)
    found = run(new_filter(), rng, truth, 50)
    settled = np.diag(found.cov).copy()
    run(found, rng, truth, 1, noise_frac=0.25)  # a noisy step
    assert (np.diag(found.cov) < 4 * settled).all()
    assert found.mean == pytest.approx(truth, abs=0.1)
    truth[2:4] = 1.6
    run(found, rng, truth, 3)
    assert found.mean == pytest.approx(truth, abs=0.12)


def test_factors_stay_within_bounds_and_uncertainty_below_the_prior():
    found = run(new_filter(), np.random.default_rng(3), np.full(NUM, 50.0), 5)
    assert found.mean.max() == 4.0
    for _ in range(50):  # nothing of the last bucket is ever seen
        expected_s = loads(np.random.default_rng(4), 8) * ([1.0] * (NUM - 1) + [0.0])
        update(found, expected_s, expected_s.sum(axis=1))
    assert np.sqrt(np.diag(found.cov)).max() <= 0.5 + 1e-9
    assert np.linalg.eigvalsh(found.cov).min() > 0
