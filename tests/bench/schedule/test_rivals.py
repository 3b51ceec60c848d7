from __future__ import annotations

import numpy as np
import pytest

from dflop.schedule.pack import bottleneck
from tests.bench.schedule.rivals import RIVALS, cp_sat, karmarkar_karp


def test_differencing_of_the_text_book():
    weights = np.array([[8.0], [7.0], [6.0], [5.0], [4.0]])
    bucket = karmarkar_karp(weights, np.ones(5, dtype=np.int64), 2)
    assert bottleneck(weights, bucket, 2) == 16.0  # best is 15: differencing is a heuristic
    thirds = karmarkar_karp(np.array([[3.0], [3.0], [3.0], [1.0], [1.0], [1.0]]), np.ones(6, dtype=np.int64), 3)
    assert sorted(np.bincount(thirds).tolist()) == [2, 2, 2]


@pytest.mark.parametrize("name", RIVALS)
def test_every_sample_gets_a_bucket(name):
    rng = np.random.default_rng(0)
    weights, tokens = rng.random((50, 2)), rng.integers(1, 9, 50)
    bucket = RIVALS[name](weights, tokens, 6)
    assert bucket.shape == (50,)
    assert set(bucket.tolist()) == set(range(6))


def test_the_reference_program_finds_the_best_split():
    found = cp_sat(np.array([[8.0], [7.0], [6.0], [5.0], [4.0]]), 2, limit_s=20.0, num_workers=1)
    if found["status"] == "not installed":
        pytest.skip("no ortools beside the environment")
    assert (found["status"], found["objective_s"]) == ("OPTIMAL", 15.0)
