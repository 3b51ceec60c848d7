from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.data.order import epoch_of, epoch_order, global_batch, steps_per_epoch

sizes = st.integers(1, 200), st.integers(1, 50)


@given(st.integers(0, 2**64 - 1), st.integers(0, 5), *sizes)
def test_every_sample_once_per_epoch(seed: int, epoch: int, num_samples: int, batch: int) -> None:
    steps = steps_per_epoch(num_samples, batch)
    batches = [global_batch(seed, epoch * steps + i, num_samples, batch) for i in range(steps)]
    assert sorted(np.concatenate(batches).tolist()) == list(range(num_samples))
    assert all(len(b) == batch for b in batches[:-1])
    assert {epoch_of(epoch * steps + i, num_samples, batch) for i in range(steps)} == {epoch}


def test_order_is_pinned() -> None:
    # Literal values: a change here silently reshuffles every run that is resumed.
    assert global_batch(0, 0, 10, 10).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert global_batch(0, 1, 10, 10).tolist() == [5, 3, 7, 8, 2, 4, 1, 0, 6, 9]


def test_order_does_not_depend_on_the_batch_size() -> None:
    whole = global_batch(3, 0, 60, 60)
    assert np.array_equal(np.concatenate([global_batch(3, i, 60, 7) for i in range(9)]), whole)


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(epoch_order(seed, epoch, 50)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_order_cannot_be_changed_through_a_batch() -> None:
    with pytest.raises(ValueError, match="read-only"):
        global_batch(0, 0, 10, 5)[0] = 1


@pytest.mark.parametrize(("step", "num_samples", "batch"), [(-1, 10, 5), (0, 0, 5), (0, 10, 0)])
def test_impossible_arguments(step: int, num_samples: int, batch: int) -> None:
    with pytest.raises(ValueError, match=r"negative|positive"):
        global_batch(0, step, num_samples, batch)
