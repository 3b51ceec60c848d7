import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.data.annotations import MediaRef
from dflop.data.mixture import Dataset, make_entry, select
from dflop.errors import ConfigError
from tests.data.containers import ROWS, jsonl_of, parquet_of, read, tar_of

counts = st.integers(0, 300)
percents = st.integers(0, 10_000).map(lambda hundredths: f"{hundredths / 100:g}%")


@given(counts, st.integers(0, 400))
def test_numbers_of_rows(num_rows, count):
    rows = np.arange(num_rows)
    assert select(num_rows, f"first:{count}").tolist() == rows[:count].tolist()
    assert select(num_rows, f"end:{count}").tolist() == rows[max(0, num_rows - count) :].tolist()
    assert select(num_rows, "all").tolist() == rows.tolist()


@given(counts, st.integers(0, 100))
def test_a_share_from_the_start_and_the_rest_from_the_end_are_all(num_rows, percent):
    first, end = select(num_rows, f"first:{percent}%"), select(num_rows, f"end:{100 - percent}%")
    assert np.union1d(first, end).tolist() == list(range(num_rows))
    assert len(first) == math.ceil(percent * num_rows / 100)
    assert len(np.intersect1d(first, end)) == (percent * num_rows % 100 > 0), "both are rounded up"


@settings(max_examples=40)
@given(counts, percents, st.integers(0, 2**64 - 1), st.text())
def test_random_rows_are_distinct_in_order_and_as_many_as_from_the_start(num_rows, percent, seed, name):
    chosen = select(num_rows, f"random:{percent}", seed, name)
    assert len(chosen) == len(select(num_rows, f"first:{percent}"))
    assert (np.diff(chosen) > 0).all()
    assert not len(chosen) or (chosen[0] >= 0 and chosen[-1] < num_rows)
    assert np.array_equal(chosen, select(num_rows, f"random:{len(chosen)}", seed, name))
    assert np.isin(select(num_rows, f"random:{len(chosen) // 2}", seed, name), chosen).all()


def test_random_rows_are_pinned_and_differ_by_seed_and_name():
    assert select(1000, "random:0.6%", 7, "a.json").tolist() == [123, 146, 189, 354, 531, 828]
    others = [select(1000, "random:100", seed, name) for seed, name in ((7, "a"), (8, "a"), (7, "b"))]
    assert all(len(np.intersect1d(a, b)) < 30 for a in others for b in others if a is not b)
    hits = np.bincount(np.concatenate([select(10, "random:3", seed, "x") for seed in range(1000)]), minlength=10)
    assert (abs(hits - 300) < 75).all()  # five standard deviations


@pytest.mark.parametrize(
    "strategy", ["", "first", "first:", "first:-1", "first:1.5", "last:3", "first:101%", "random:x", "all:3", "first:٣"]
)
def test_unknown_strategies_list_the_valid_ones(strategy):
    with pytest.raises(ConfigError, match=r"random:P%"):
        select(10, strategy)


@pytest.fixture
def everything(tmp_path: Path, media_root: Path) -> Dataset:
    """The same rows as two JSONL files, two shards and a Parquet file."""
    for number in range(2):
        (tmp_path / f"part{number}").mkdir()
        jsonl_of(ROWS, tmp_path / f"part{number}" / "a.jsonl")
        tar_of(ROWS, media_root, tmp_path / f"s-{number:03d}.tar")
    parquet_of(ROWS, media_root, tmp_path / "a.parquet", embed=True, row_group_size=2)
    return Dataset.open(
        [
            make_entry("part{0,1}/a.jsonl", Path("media"), folder=tmp_path, strategy="end:7"),
            make_entry("part0/a.jsonl", Path("media"), folder=tmp_path, strategy="first:0"),
            make_entry("s-{000..001}.tar", Path("absent"), folder=tmp_path, strategy="all"),
            make_entry("a.parquet", Path("absent"), folder=tmp_path, strategy="random:40%"),
        ]
    )


def test_samples_are_numbered_over_all_entries_in_order(everything, media_root, tmp_path):
    assert len(everything) == 7 + 0 + 10 + 2
    located = [everything.locate(i) for i in range(len(everything))]
    random = select(5, "random:2", 0, "a.parquet").tolist()
    assert located == [*((0, r) for r in range(3, 10)), *((2, r) for r in range(10)), *((3, r) for r in random)]
    plain = Dataset.open([make_entry("part0/a.jsonl", media_root, folder=tmp_path)])
    for index, (_, row) in enumerate(located):
        sample, twin = everything.sample(index), plain.sample(row % 5)
        assert dataclasses.replace(sample, media=()) == dataclasses.replace(twin, media=(), sample_index=index)
        wanted = [read(plain.open_media(row % 5, ref)) for ref in twin.media]
        assert [read(everything.open_media(index, ref)) for ref in sample.media] == wanted
    for index in (-1, len(everything)):
        with pytest.raises(IndexError):
            everything.sample(index)


def test_media_fingerprints_are_of_files_beside_the_data(everything, media_root):
    beside, inside = everything.sample(1), everything.sample(7)
    before = everything.media_fingerprint(1, MediaRef("image", "cat.png"))
    assert beside.media
    assert before not in ("", "absent")
    (media_root / "cat.png").write_bytes(b"longer" * 9999)
    assert everything.media_fingerprint(1, MediaRef("image", "cat.png")) != before
    assert everything.media_fingerprint(7, inside.media[0]) == ""
    for path in ("no.png", "../a.parquet", "a\0b"):
        assert everything.media_fingerprint(1, MediaRef("image", path)) == "absent"


def test_fingerprint_is_of_rows_and_choice(tmp_path):
    def fingerprint(name: str = "a.jsonl", strategy: str = "random:2", seed: int = 0, rows: int = 5) -> str:
        jsonl_of(ROWS[:rows], tmp_path / name)
        return Dataset.open([make_entry(name, tmp_path, folder=tmp_path, strategy=strategy)], seed).fingerprint()

    same = fingerprint()
    assert fingerprint() == same
    assert fingerprint(strategy="random:40%") == same
    assert fingerprint(strategy="first:5") == fingerprint("b.jsonl", strategy="all")
    assert len({same, fingerprint(strategy="all"), fingerprint(seed=5), fingerprint(rows=4)}) == 4


def test_weights_are_expected_draws(tmp_path):
    jsonl_of(ROWS, tmp_path / "a.jsonl")

    def dataset(*entries: tuple[str, float | None]) -> Dataset:
        return Dataset.open(
            [
                dataclasses.replace(make_entry("a.jsonl", tmp_path, folder=tmp_path, strategy=s), weight=w)
                for s, w in entries
            ]
        )

    assert dataset(("all", None), ("first:1", None)).weights().tolist() == [1.0] * 6
    weights = dataset(("first:4", 1.0), ("first:2", 2.0), ("first:0", 5.0)).weights()
    assert weights.tolist() == pytest.approx([0.5] * 4 + [2.0] * 2)
    assert weights.sum() == pytest.approx(6)
    assert dataset(("first:0", 1.0)).weights().tolist() == []
    with pytest.raises(ConfigError, match="has no weight, but others do"):
        dataset(("all", 1.0), ("all", None))
