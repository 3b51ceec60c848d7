from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.data.formats.row_source import RowSource
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


class FourRows(RowSource):
    def __len__(self):
        return 4

    def row(self, index):
        raise NotImplementedError


def dataset(*names, root="media/{}"):
    """Four rows of each entry."""
    entries = [MixtureEntry(name, (), Path(root.format(name))) for name in names]
    return Dataset(entries, [[FourRows(Path(name, "0.parquet"))] for name in names], [np.arange(4) for _ in names])


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
    with pytest.raises(DataError, match=r"3 of 4 samples of b\.json are trained on, too.*row 4 \(id `s0`\)"):
        sources_held_out(dataset("a.json", "b.json", root="media"), shapes, ["b.json"])


@pytest.mark.parametrize("path", ["1.jpg", "0.parquet#0.image.0"])
def test_paths_from_different_folders_are_different_pictures(path):
    (picture,) = make_sample(0, 20, [("vision", 9)]).items
    shapes = [replace(make_sample(i, 20 + i), items=(replace(picture, path=path),)) for i in (0, 4)]
    root = "media" if "#" in path else "media/{}"
    assert sources_held_out(dataset("a.json", "b.json", root=root), shapes, ["b.json"]).tolist() == [1]


def test_equal_content_is_found_under_other_ids_and_paths():
    shapes = [replace(make_sample(i, 20 + i, [("vision", 9)]), content_hash=5 + i % 3) for i in (0, 1, 4, 5)]
    with pytest.raises(DataError, match="1 of 2 samples"):
        sources_held_out(dataset("a.json", "b.json"), shapes, ["b.json"])
    assert {tuple(held_out(shapes, 2, seed)) for seed in range(20)} == {(1, 2), (0, 3)}


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=1, max_size=12), st.integers(0, 99))
def test_groups_are_the_connected_samples(keys, seed):
    (picture,) = make_sample(0, 20, [("vision", 9)]).items
    shapes = [
        replace(make_sample(i, 20), items=(replace(picture, path=str(m)),), content_hash=c)
        for i, (m, c) in enumerate(keys)
    ]
    out = set(held_out(shapes, len(shapes) // 2, seed).tolist())
    inside, outside = [k for p, k in enumerate(keys) if p in out], [k for p, k in enumerate(keys) if p not in out]
    assert {m for m, _ in inside}.isdisjoint(m for m, _ in outside)
    assert {c for _, c in inside}.isdisjoint(c for _, c in outside)
