from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.data.holdout import held_out, sources_held_out
from dflop.data.mixture import Dataset, MixtureEntry
from dflop.errors import DataError
from tests.builders import make_sample, random_batch


def content(shape):
    return [item.path for item in shape.items] or (shape.sample_id, shape.num_text_tokens)


@given(st.integers(0, 2**64 - 1), st.integers(1, 60), st.integers(0, 3))
def test_nothing_that_is_trained_is_held_out(seed, num_samples, num_repeats):
    shapes = random_batch(40, seed=1)
    for number in range(num_repeats):
        shapes += tuple(replace(s, sample_index=100 * (number + 1) + s.sample_index) for s in shapes[:7])
    out = held_out(shapes, num_samples, seed).tolist()
    assert len(set(out)) == len(out) <= num_samples
    assert out == sorted(out) == held_out(shapes, num_samples, seed).tolist()
    validated = [content(shapes[p]) for p in out]
    assert not any(content(s) in validated for p, s in enumerate(shapes) if p not in out)
    assert num_repeats or len(out) == min(num_samples, 40)


def test_samples_differ_by_seed():
    shapes = random_batch(100, seed=2)
    assert held_out(shapes, 10, 0).tolist() != held_out(shapes, 10, 1).tolist()


def test_a_picture_of_all_samples_leaves_nothing_to_hold_out():
    (picture,) = make_sample(0, 20, [("vision", 9)]).items
    shapes = [replace(make_sample(index, 20 + index), items=(picture,)) for index in range(10)]
    assert not len(held_out(shapes, 9, 0))
    assert len(held_out(shapes, 10, 0)) == 10


def test_samples_without_loss_are_not_held_out():
    shapes = [make_sample(index, 20 + index, num_supervised_tokens=index % 2) for index in range(10)]
    assert held_out(shapes, 10, 0).tolist() == [1, 3, 5, 7, 9]


def dataset(*names):
    """Four rows of each entry."""
    entries = [MixtureEntry(name, (), Path()) for name in names]
    return Dataset(entries, [[] for _ in names], [np.arange(4) for _ in names])


@pytest.mark.parametrize(
    ("names", "out"),
    [
        (["b.json"], [3, 4, 5, 6]),
        (["validation"], [7, 8, 9, 10]),
        (["b.json", "llava-val-00000.parquet"], list(range(3, 11))),
    ],
)
def test_whole_entries_are_held_out_by_their_names_or_splits(names, out):
    shapes = [s for s in random_batch(12, seed=1) if s.sample_index != 2]  # one was quarantined
    of = dataset("a.json", "b.json", "llava-val-00000.parquet")
    assert sources_held_out(of, shapes, names).tolist() == out


def test_an_unknown_entry_is_refused_with_the_known_ones():
    with pytest.raises(DataError, match=r"no sample is of `c\.json`") as caught:
        sources_held_out(dataset("a.json", "b.json"), random_batch(8), ["c.json"])
    assert "b.json" in caught.value.hint


def test_samples_of_an_entry_that_are_trained_on_are_counted():
    shapes = list(random_batch(4, seed=1))
    shapes += [replace(s, sample_index=4 + s.sample_index) for s in shapes[:3]] + [make_sample(7, 99)]
    with pytest.raises(DataError, match=r"3 of 4 samples of b\.json are trained on, too"):
        sources_held_out(dataset("a.json", "b.json"), shapes, ["b.json"])
