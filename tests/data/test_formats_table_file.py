from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflop.data.annotations import BadSample, MediaRef
from dflop.data.formats import table_file
from dflop.data.formats.source import open_source
from dflop.data.formats.table_file import TableFile
from dflop.errors import ConfigError, DataError
from tests.data.containers import ROWS, content_of, jsonl_of, parquet_of


def table_of(tmp_path: Path, **columns: Any) -> TableFile:
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    return TableFile(tmp_path / "t.parquet")


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("embed", "window_bytes", "row_group_size"), [(True, 1, 2), (True, 2**25, 100), (True, 2**25, 2), (False, 1, 2)]
)
def test_parquet_gives_the_same_samples_as_jsonl(
    tmp_path, media_root, monkeypatch, embed, window_bytes, row_group_size
):
    monkeypatch.setattr(table_file, "_WINDOW_BYTES", window_bytes)
    plain = open_source(jsonl_of(ROWS, tmp_path / "a.jsonl"))
    path = parquet_of(ROWS, media_root, tmp_path / "a[0].parquet", embed=embed, row_group_size=row_group_size)
    parquet = open_source(path)
    assert len(parquet) == len(plain)
    root = tmp_path / "nowhere" if embed else media_root
    for index in (3, 0, 4, 1, 2):
        assert content_of(parquet, root, index) == content_of(plain, media_root, index)
    names = [ref.path for ref in parquet.sample(4).media]
    assert names == (["a[0].parquet#4.image.0", "a[0].parquet#4.image.1"] if embed else ["cat.png"] * 2)


def test_media_columns_of_any_shape(tmp_path, media_root):
    cat = (media_root / "cat.png").read_bytes()
    said = pa.array([talk("hi", "ok")] * 2)
    for column in (
        [{"bytes": cat, "path": None}, None],
        [cat, None],
        [[cat], []],
        ["cat.png", None],
        [["cat.png"], None],
    ):
        parquet = table_of(tmp_path, messages=said, image=column)
        assert content_of(parquet, media_root, 0)[3] == [("image", cat)]
        assert parquet.sample(1).media == ()


def test_bytes_count_wherever_they_stand_and_path_is_a_name_only(tmp_path, media_root):
    cat = (media_root / "cat.png").read_bytes()
    for entry in (
        {"bytes": cat, "path": "absent.png"},
        {"bytes": cat, "path": None},
        {"bytes": None, "path": "cat.png"},
    ):
        image = {"type": "image", "image": entry, "text": None}
        part_lists = ([image, {"type": "text", "text": "hi"}], [{"type": "text", "text": "ok"}])
        said = [{"role": r, "content": c} for r, c in zip(("user", "assistant"), part_lists, strict=True)]
        for columns in ({"messages": [said]}, {"messages": [talk("hi", "ok")], "images": [[entry]]}):
            parquet = table_of(tmp_path, **columns)
            assert content_of(parquet, media_root, 0)[3] == [("image", cat)]
            assert parquet.embeds(parquet.sample(0).media[0]) == (entry["bytes"] is not None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("thumbnail", b"x"), ("depth", {"bytes": b"x", "path": None}), ("image_2", "b.png"),
        ("views", ["a.png", "b.png"]), ("jpg", b"x"), ("rejected", "worse"), ("fps", 2.0),
    ],
)  # fmt: skip
def test_columns_that_hold_media_or_change_what_is_learnt_are_a_reason(tmp_path, name, value):
    path = table_of(tmp_path, messages=[talk("hi", "ok")] * 2, image=["a.png"] * 2, **{name: [value, None]}).path
    with pytest.raises(BadSample, match=f"`{name}`"):
        TableFile(path).sample(0)
    assert len(TableFile(path).sample(1).media) == 1, "a null says nothing"
    assert len(TableFile(path, (name,)).sample(0).media) == 1


def test_files_without_rows_of_ours_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"columns are label, answer[\s\S]*conversations, messages"):
        table_of(tmp_path, label=["x"], answer=["y"])
    with pytest.raises(DataError, match="cannot be read"):
        TableFile(tmp_path / "absent.parquet")
    with pytest.raises(ConfigError, match=r"decompress it.*\.jsonl\.zst, .*\.parquet, .*\.tar"):
        open_source(tmp_path / "x.tar.gz")
    with pytest.raises(ConfigError, match=r"\.parquet"):
        open_source(tmp_path / "x.mds")


def test_bad_rows_and_names(tmp_path):
    parquet = table_of(tmp_path, messages=[talk("hi", "ok"), None, talk("hi")], image=["../x.png", None, ""])
    for index, reason in {1: "no `conversations`", 2: "names no file: ''"}.items():
        with pytest.raises(BadSample, match=reason):
            parquet.sample(index)
    for path, reason in {"t.parquet#0.image.9": "no such media item", "../x.png": "leaves"}.items():
        with pytest.raises(BadSample, match=reason):
            parquet.open_media(0, MediaRef("image", path), tmp_path)
    with pytest.raises(IndexError):
        parquet.sample(3)


def test_a_file_cut_off_is_refused(tmp_path, media_root):
    whole = parquet_of(ROWS, media_root, tmp_path / "a.parquet", embed=True, row_group_size=2).read_bytes()
    for size in [0, 1, 8, *range(100, len(whole), len(whole) // 20), len(whole) - 1]:
        (tmp_path / "cut.parquet").write_bytes(whole[:size])
        with pytest.raises(DataError, match="cannot be read"):
            TableFile(tmp_path / "cut.parquet")


def test_damage_costs_the_rows_of_its_row_group(tmp_path):
    rows = pa.table({"messages": [talk(f"{i}" * 50, "ok") for i in range(6)]})
    path = tmp_path / "a.parquet"
    pq.write_table(rows, path, row_group_size=2, use_dictionary=False, compression="zstd")
    chunk = pq.read_metadata(path).row_group(1).column(0)
    content = bytearray(path.read_bytes())
    for i in range(chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size):
        content[i] = 0xFF
    path.write_bytes(content)
    parquet = TableFile(path)
    outcomes = []
    for index in range(6):
        try:
            outcomes.append(parquet.sample(index).turns[1].text)
        except BadSample as error:
            outcomes.append(error.reason.partition(":")[0])
    assert outcomes == ["ok", "ok", "row cannot be read", "row cannot be read", "ok", "ok"]


def test_a_file_that_changed_is_read_again(tmp_path):
    assert table_of(tmp_path, text=["before"]).sample(0).turns[0].text == "before"
    first = table_of(tmp_path, text=["before"]).fingerprint()
    parquet = table_of(tmp_path, text=["after, and longer"])
    assert parquet.sample(0).turns[0].text == "after, and longer"
    assert parquet.fingerprint() != first
