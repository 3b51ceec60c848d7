"""Two processes under the trainers people use: the gradient of every step is that of its samples one at a time."""

import os
import socket
from pathlib import Path

import pytest
import torch

from dflop.sampler import BalancedBatchSampler
from tests.forked import run_module
from tests.sampler.tiny import costs_of, error_frac, exact_gradient, make_dataset
from tests.sampler.trainers import BATCH, CASES, NUM_STEPS, RESTS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trainers")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    done = run_module("tests.sampler.trainers", str(folder), cwd=ROOT, env=env, timeout_s=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def expected_of(dataset) -> list[tuple[set[int], torch.Tensor]]:
    """Samples and gradient of every step, from a single process that has never heard of two."""
    sampler = BalancedBatchSampler(costs_of(dataset), BATCH, num_replicas=1, rank=0)
    batches = [set(step.indices[0]) for step in sampler.steps(until=NUM_STEPS)]
    return [(batch, exact_gradient(dataset, batch)) for batch in batches]


@pytest.fixture(scope="module")
def expected() -> list[tuple[set[int], torch.Tensor]]:
    return expected_of(make_dataset())


def test_the_trainers_own_order_is_followed_by_two_ranks(runs):
    dataset = make_dataset()
    expected = [exact_gradient(dataset, set(range(k * BATCH, (k + 1) * BATCH))) for k in range(NUM_STEPS)]
    for gradients, _ in (torch.load(runs / f"sequential-{r}.pt") for r in range(2)):
        assert all(error_frac(found, exact) < 1e-5 for found, exact in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("name", RESTS)
def test_one_sample_left_for_two_ranks_counts_once(name, runs):
    expected = expected_of(make_dataset()[: BATCH + 1])
    assert [len(batch) for batch, _ in expected] == [BATCH, 1]
    for gradients, _ in (torch.load(runs / f"{name}-{r}.pt") for r in range(2)):
        for found, (_, exact) in zip(gradients, expected, strict=True):
            assert error_frac(found, exact) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_global_batch(name, runs, expected):
    ranks = [torch.load(runs / f"{name}-{r}.pt") for r in range(2)]
    for gradients, _ in ranks:
        assert len(gradients) == NUM_STEPS
        for found, (_, exact) in zip(gradients, expected, strict=True):
            assert error_frac(found, exact) < 1e-5
    drawn = [set(seen[: 2 * BATCH]) for _, seen in ranks]  # trainers may have looked one batch further
    assert set().union(*(batch for batch, _ in expected)) <= drawn[0] | drawn[1]


def test_ranks_with_other_costs_are_refused_by_all(runs):
    for rank in range(2):
        assert "rank(s) 1 have other costs, settings or order" in (runs / f"refusal-{rank}").read_text()
