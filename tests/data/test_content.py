"""Rows that teach the same have one hash, wherever their media lie and however their texts are written."""

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dflop.data.dataset_profile import DatasetRef, profile_shard
from dflop.data.holdout import sources_held_out
from dflop.data.mixture import MixtureEntry
from dflop.errors import DataError
from tests.data.helpers import chat


def test_what_changes_the_content_and_what_does_not(write_rows, family, media_root):
    (media_root / "copies").mkdir()
    shutil.copyfile(media_root / "cat.png", media_root / "copies" / "cat.png")
    Image.new("RGB", (64, 30)).save(media_root / "dog.png")
    same = [
        chat("<image> What is  it?", "A cat", id="1", image="cat.png"),
        chat("<image> what is\nit?", "a cat ", id="2", image="copies/cat.png", source="x"),
    ]
    others = [
        chat("<image> What is it?", "A dog", image="cat.png"),
        chat("<image> What is it?", "A cat", image="dog.png"),
        chat("What is it?", "A cat"),
        chat("What is it? A", "cat"),
    ]
    shapes, bad = profile_shard(write_rows([*same, *others]), family, 0, 1)
    found = [shape.content_hash for shape in shapes]
    assert not bad
    assert found[0] == found[1]
    assert len(set(found)) == 1 + len(others)
    assert 0 not in found


def test_bytes_in_containers_are_told_apart_by_their_content(tmp_path, family, media_root, tokenizer_path):
    cat = (media_root / "cat.png").read_bytes()
    Image.new("RGB", (60, 30), "red").save(media_root / "red.png")
    red = (media_root / "red.png").read_bytes()
    said = chat("<image> What is it?", "A picture")["conversations"]
    files = {"train": [cat, cat], "validation": [red, cat]}
    for name, images in files.items():
        column = [{"bytes": image, "path": None} for image in images]
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"conversations": [said] * 2, "image": column}), tmp_path / name / "0.parquet")
    entries = tuple(MixtureEntry(name, (tmp_path / name / "0.parquet",), tmp_path) for name in files)
    dataset = DatasetRef(entries, tokenizer_path, 2048)
    shapes, bad = profile_shard(dataset, family, 0, 1)
    assert not bad
    assert [s.content_hash == shapes[0].content_hash for s in shapes] == [True, True, False, True]
    with pytest.raises(DataError, match=r"1 of 2 samples of validation .*; row 3 "):
        sources_held_out(dataset.open(), shapes, ["validation"])
