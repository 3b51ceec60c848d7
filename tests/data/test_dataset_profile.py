import dataclasses
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.data import dataset_profile
from dflop.data.dataset_profile import DatasetRef, dataset_keys, profile_key, profile_shard, shard_rows
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
    said, done = list[str](), list[tuple[int, int]]()
    found = profile_shard(
        dataset, family, 0, 1, said.append, at=lambda _, *numbers: done.append(numbers), key="key", num_workers=2
    )
    assert found == alone
    assert done == [(n, 15) for n in (0, 4, 8, 12, 15)]
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


def test_rows_that_were_profiled_before_are_found_where_a_dataset_has_grown(write_rows, family, tmp_path):
    """Rows, files or entries are added at the end; whatever else has changed, nothing is taken."""

    @given(st.data())
    def grows(data):
        text = st.sampled_from(
            [chat("a", "b"), chat("a b c", "d"), '{"broken', chat("<image> a", "b", image="cat.png")]
        )
        before = data.draw(st.lists(text, min_size=1, max_size=6), label="rows before")
        after = data.draw(st.lists(text, min_size=1, max_size=4), label="rows added")
        end, blank = data.draw(st.sampled_from([("", ""), ("\n", ""), ("\n\n", ""), ("\n", "\n")]), label="line ends")
        dataset = write_rows([])
        (entry,) = dataset.entries
        (first,), second = entry.paths, tmp_path / "second.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in before]
        first.write_text("\n".join(lines) + end)
        known = {profile_key(dataset, family): len(before), "other": len(before), "longer": 99}
        added = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in after)
        how = data.draw(
            st.sampled_from(["rows", "file", "entry", "a row changed", "rows before", "file before", "some"])
        )
        if how == "rows":
            first.write_text("\n".join(lines) + (end or "\n") + blank + added)
        elif how in ("file", "entry", "file before"):
            second.write_text(json.dumps(chat("x", "y")) + "\n" * 2 + added if how == "file before" else added)
            paths = (
                [(first, second)]
                if how == "file"
                else [(second, first)]
                if how == "file before"
                else [(first,), (second,)]
            )
            dataset = dataclasses.replace(dataset, entries=tuple(dataclasses.replace(entry, paths=p) for p in paths))
        elif how == "a row changed":
            first.write_text("\n".join([*lines[:-1], json.dumps(chat("x", "y"))]) + "\n" + added)
        elif how == "rows before":
            first.write_text(json.dumps(chat("x", "y")) + "\n" + "\n".join(lines) + "\n" + added)
        else:  # which rows it takes depends on how many there are
            first.write_text("\n".join(lines) + (end or "\n") + added)
            dataset = dataclasses.replace(dataset, entries=(dataclasses.replace(entry, strategy="end:100%"),))
        keys = dataset_keys(dataset, family, known)
        assert keys == dataclasses.replace(
            dataset_keys(dataset, family), base=keys.base, num_base_rows=keys.num_base_rows
        )
        if how in ("rows", "file", "entry"):
            assert (keys.base, keys.num_base_rows) == (next(iter(known)), len(before))
            assert keys.num_rows == len(before) + len(after)
            whole = profile_shard(dataset, family, 0, 1, key="key")
            parts = [profile_shard(dataset, family, i, 2, key="key", first_row=len(before)) for i in range(2)]
            for kind in (0, 1):
                new = [row for row in whole[kind] if row.sample_index >= len(before)]
                assert [row for part in parts for row in part[kind]] == new
        elif how != "some":
            assert keys.base == ""

    grows()


def test_a_media_file_of_known_rows_that_has_changed_makes_them_unknown(write_rows, family):
    dataset = write_rows(ROWS[:2])
    known = {profile_key(dataset, family): 2}
    grown = write_rows(ROWS)
    assert dataset_keys(grown, family, known).num_base_rows == 2
    os.utime(grown.entries[0].media_root / "cat.png", ns=(1, 1))
    assert dataset_keys(grown, family, known).base == ""
