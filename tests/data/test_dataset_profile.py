import dataclasses
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.data import dataset_profile
from dflop.data.dataset_profile import DatasetRef, profile_key, profile_shard, shard_rows
from dflop.errors import DataError
from tests.data.helpers import TinyFamily, chat

ROWS = [
    chat("<image> a", "b", id="0", image="cat.png"),
    chat("a", "b", id="1"),
    '{"broken',
    chat("<image> a", "b", id="3", image="gone.png"),
    chat("<audio> a", "b", id="1", audio="tone.flac"),
]


@pytest.mark.parametrize("num_shards", [3, 8])
def test_shards_laid_end_to_end_are_the_profile(write_rows, family, num_shards):
    dataset = write_rows(ROWS)
    whole = profile_shard(dataset, family, 0, 1)
    shards = [profile_shard(dataset, family, i, num_shards) for i in range(num_shards)]
    assert [s for shapes, _ in shards for s in shapes] == whole[0]
    assert [q for _, quarantined in shards for q in quarantined] == whole[1]
    assert [s.sample_id for s in whole[0]] == ["0", "1", "1"], "an id that occurs twice is kept twice"
    assert sorted([s.sample_index for s in whole[0]] + [q.sample_index for q in whole[1]]) == list(range(len(ROWS)))
    assert {s.profile_key for s in whole[0]} == {profile_key(dataset, family)}


@given(st.integers(0, 500), st.integers(1, 40))
def test_every_row_is_in_one_shard(num_rows, num_shards):
    shards = [shard_rows(num_rows, i, num_shards) for i in range(num_shards)]
    assert [row for shard in shards for row in shard] == list(range(num_rows))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_a_pool_of_processes_gives_the_same_rows(write_rows, family, monkeypatch):
    dataset = write_rows(ROWS * 3)
    alone = profile_shard(dataset, family, 0, 1, key="key")
    monkeypatch.setattr(dataset_profile, "BLOCK_ROWS", 4)
    said: list[str] = []
    assert profile_shard(dataset, family, 0, 1, said.append, key="key", num_workers=2) == alone
    assert said[-1].startswith("data profile, shard 1 of 1: 15 rows, 6 skipped")


def test_keys_that_nobody_knows_are_counted_and_said_once(write_rows, family, monkeypatch):
    monkeypatch.setattr(dataset_profile, "BLOCK_ROWS", 2)
    dataset, said = write_rows([chat("a", "b", reviewer=i, source="x", **{"$": 1} if i else {}) for i in range(5)]), []
    profile_shard(dataset, family, 0, 1, said.append, key="key")
    assert [line for line in said if "keys" in line] == [said[-1]]
    assert said[-1].endswith("unknown keys, ignored: reviewer (5 rows), $ (4 rows)")


def test_unchanged_files_are_not_read_again(write_rows, family, tmp_path):
    dataset, cache, said = write_rows(ROWS), tmp_path / "cache", []
    first = profile_shard(dataset, family, 0, 1, said.append, key="key", cache=cache)
    assert said[-1].endswith("2 media files read")
    assert profile_shard(dataset, family, 0, 1, said.append, key="key", cache=cache, num_workers=2) == first
    assert said[-1].endswith("0 media files read")
    (dataset.entries[0].media_root / "cat.png").write_bytes(b"no longer a picture")
    shapes, quarantined = profile_shard(dataset, family, 0, 1, said.append, key="key", cache=cache)
    assert said[-1].endswith("1 media files read")
    assert (len(shapes), len(quarantined)) == (2, 3)
    for file in cache.rglob("*.parquet"):
        file.write_bytes(b"lost")
    assert profile_shard(dataset, family, 0, 1, said.append, key="key", cache=cache) == (shapes, quarantined)
    assert said[-1].endswith("2 media files read")


def test_key_follows_everything_that_decides_a_shape(write_rows, family, tmp_path):
    dataset = write_rows(ROWS)
    keys = [profile_key(dataset, family), profile_key(dataset, TinyFamily({"depth": 2}, {}))]
    (dataset.entries[0].media_root / "unused.png").write_bytes(b"x")
    assert profile_key(dataset, family) == keys[0], "no row names the file"
    for change in ({"max_llm_tokens": 7}, {"overlong": ("shrink",)}, {"min_side_px": 9}, {"chat_template": "qwen"}):
        keys.append(profile_key(dataclasses.replace(dataset, **change), family))
    os.utime(dataset.entries[0].media_root / "cat.png", ns=(0, 0))
    keys.append(profile_key(dataset, family))
    (dataset.entries[0].media_root / "gone.png").write_bytes(b"here now")
    keys.append(profile_key(dataset, family))
    tokenizer = tmp_path / "other.json"
    tokenizer.write_text(dataset.tokenizer.read_text() + "\n")
    keys.append(profile_key(dataclasses.replace(dataset, tokenizer=tokenizer), family))
    keys.append(profile_key(write_rows([*ROWS, chat("a", "b")]), family))
    assert len(set(keys)) == len(keys)


def test_dataset_that_cannot_be_read(write_rows, family, tmp_path):
    dataset = write_rows(ROWS)
    elsewhere = DatasetRef.of_file(dataset.entries[0].paths[0], tmp_path / "none", dataset.tokenizer, 9)
    with pytest.raises(DataError, match="media root is not a folder"):
        profile_shard(elsewhere, family, 0, 1)
    with pytest.raises(DataError, match="cannot be read"):
        profile_key(DatasetRef.of_file(tmp_path / "none.jsonl", tmp_path, dataset.tokenizer, 1), family)
    with pytest.raises(ValueError, match=r"not in 0\.\.1"):
        profile_shard(dataset, family, 2, 2)
