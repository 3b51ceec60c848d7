import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.data.sample_order import SampleOrder

seeds, epochs = st.integers(0, 2**64 - 1), st.integers(0, 5)


@given(seeds, epochs, st.integers(1, 200), st.integers(1, 50))
def test_every_sample_once_per_epoch(seed, epoch, num_samples, batch):
    order = SampleOrder(seed, num_samples, batch)
    steps = order.steps_per_epoch
    batches = [order.batch(epoch * steps + i) for i in range(steps)]
    assert sorted(np.concatenate(batches).tolist()) == list(range(num_samples))
    assert all(len(b) == batch for b in batches[:-1])


@given(seeds, epochs, st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=200), st.integers(1, 50))
def test_draws_of_an_epoch_stray_less_than_one_from_the_weights(seed, epoch, weights, batch):
    given_weights = np.array(weights)
    order = SampleOrder(seed, len(weights), batch, given_weights)
    counts = np.bincount(order.epoch(epoch), minlength=len(weights))
    assert counts.sum() == len(weights)
    expected = given_weights / given_weights.sum() * len(weights)
    assert (np.abs(counts - expected) < 1 + 1e-6).all()
    for step in range(order.steps_per_epoch):
        drawn = order.batch(epoch * order.steps_per_epoch + step)
        assert len(set(drawn.tolist())) == len(drawn)
        at = step * batch
        assert set(drawn.tolist()) == set(order.epoch(epoch)[at : at + batch].tolist())


def test_over_epochs_weights_are_met_on_average():
    weights = np.array([0.3] * 40 + [1.7] * 20 + [5.5] * 2)
    order = SampleOrder(1, 62, 8, weights)
    counts = sum(np.bincount(order.epoch(e), minlength=62) for e in range(2000)) / 2000
    # Standard error of each at most 0.5 / sqrt(2000) = 0.011.
    assert counts == pytest.approx(weights / weights.sum() * 62, abs=0.05)
    assert len({tuple(order.epoch(e)) for e in range(9)}) == 9


def test_repetitions_are_spread_over_the_epoch():
    order = SampleOrder(5, 1000, 10, np.array([100.0] + [1.0] * 999)).epoch(0)
    gaps = np.diff(np.flatnonzero(order == 0))
    assert len(gaps) >= 89
    assert 3 <= gaps.min() <= gaps.max() <= 22  # random places: 0 to about 50


@given(seeds, epochs, st.integers(1, 200), st.floats(1e-3, 1e3))
def test_equal_weights_are_no_weights(seed, epoch, num_samples, weight):
    weighted = SampleOrder(seed, num_samples, 3, np.full(num_samples, weight)).epoch(epoch)
    assert np.array_equal(weighted, SampleOrder(seed, num_samples, 3).epoch(epoch))


def test_order_is_pinned():
    # Literal values: a change here silently reshuffles every run that is resumed.
    order = SampleOrder(0, 10, 10)
    assert order.batch(0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert order.batch(1).tolist() == [5, 3, 7, 8, 2, 4, 1, 0, 6, 9]
    weighted = SampleOrder(0, 10, 10, np.array([1.0] * 8 + [4.0] * 2))
    assert weighted.epoch(0).tolist() == [0, 9, 8, 1, 5, 9, 3, 8, 9, 6]
    assert weighted.epoch(1).tolist() == [8, 5, 9, 3, 8, 4, 1, 6, 8, 9]
    windows = SampleOrder(0, 10, 10, window=4)
    assert windows.epoch(0).tolist() == [0, 2, 1, 3, 5, 4, 6, 7, 9, 8]
    assert windows.epoch(1).tolist() == [3, 2, 1, 0, 5, 7, 4, 6, 8, 9]


def test_order_does_not_depend_on_the_batch_size():
    whole = SampleOrder(3, 60, 60).batch(0)
    assert np.array_equal(np.concatenate([SampleOrder(3, 60, 7).batch(i) for i in range(9)]), whole)


@given(seeds, epochs, st.integers(1, 200), st.integers(1, 50), st.integers(1, 250))
def test_windows_come_in_file_order_and_each_is_shuffled(seed, epoch, num_samples, batch, window):
    order = SampleOrder(seed, num_samples, batch, window=window)
    drawn = order.epoch(epoch)
    assert sorted(drawn.tolist()) == list(range(num_samples))
    assert (drawn // window == np.arange(num_samples) // window).all()
    again = SampleOrder(seed, num_samples, batch, window=window)  # asked for one step only: no state from others
    for step in range(order.steps_per_epoch):
        positions = again.batch(epoch * order.steps_per_epoch + step)
        spanned = range(step * batch // window, (step * batch + len(positions) - 1) // window + 1)
        assert set((positions // window).tolist()) == set(spanned)
        assert np.array_equal(positions, drawn[step * batch : (step + 1) * batch])


@given(seeds, epochs, st.integers(1, 200), st.integers(0, 100), st.booleans())
def test_a_window_of_all_samples_is_no_window(seed, epoch, num, more, weighted):
    weights = np.linspace(1.0, 3.0, num) if weighted else None
    whole = SampleOrder(seed, num, 3, weights).epoch(epoch)
    assert np.array_equal(SampleOrder(seed, num, 3, weights, window=num + more).epoch(epoch), whole)


@given(seeds, st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=200), st.integers(1, 250))
def test_weights_hold_within_windows(seed, weights, window):
    given_weights = np.array(weights)
    drawn = SampleOrder(seed, len(weights), 8, given_weights, window=window).epoch(0)
    expected = given_weights / given_weights.sum() * len(weights)
    assert (np.diff(drawn // window) >= 0).all()
    assert (np.abs(np.bincount(drawn, minlength=len(weights)) - expected) < 1 + 1e-6).all()
    for first in range(0, len(weights), window):
        num_drawn = ((drawn >= first) & (drawn < first + window)).sum()
        assert abs(num_drawn - expected[first : first + window].sum()) < 1 + 1e-6


def test_order_cannot_be_changed_through_a_batch():
    with pytest.raises(ValueError, match="read-only"):
        SampleOrder(0, 10, 5).batch(0)[0] = 1
