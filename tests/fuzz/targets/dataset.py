"""Training sets of strangers: rows of every format, the files that hold them, tables of sizes.

A row is never lost: it is in the profile or in quarantine, with a reason of one line, and both can be stored.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from hypothesis import strategies as st
from PIL import Image

from dflop.data.demo_media import write_audio, write_video
from dflop.data.demo_text import train_tokenizer
from dflop.data.profile import DatasetRef, profile_shard, profile_sizes_shard
from dflop.models import load_rules
from dflop.models.media import MediaRules
from dflop.records import QuarantinedSample, SampleShape
from dflop.store import schema
from tests.data.containers import write_tar
from tests.fuzz import hostile
from tests.fuzz.target import Target, attempt

ROWS: tuple[dict[str, Any], ...] = (
    {"id": "a", "image": "cat.png", "conversations": [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt",
    "value": "a"}]},
    {"id": 2, "messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url",
    "image_url": {"url": "cat.png"}}]},
                           {"role": "assistant", "content": "b"}]},
    {"videos": ["clip.mp4"], "audio": "tone.flac", "system": "s", "conversations": {"from": ["human", "gpt"],
    "value": ["x <video><audio>", "y"]}},
    {"images": ["cat.png", "cat.png"], "texts": [{"user": "<image><image>", "assistant": "c"}]},
    {"instruction": "do", "input": "it", "output": "done", "history": [["q", "a"]]},
    {"text": "plain <image> text"},
)  # fmt: skip
_SIZES: dict[str, list[Any]] = {
    "id": ["a", "b"], "prompt_tokens": [3, 4], "response_tokens": [5, 6], "turns": [1, 2],
    "image_w": [[640], []], "image_h": [[480], []], "video_w": [[64], []], "video_h": [[48], []],
    "video_frames": [[10], []],
    "video_fps": [[2.0], []], "video_seconds": [[5.0], []], "audio_seconds": [[1.5], []],
}  # fmt: skip


def make_media(folder: Path) -> Path:
    """A folder with `cat.png`, `clip.mp4` and `tone.flac`."""
    folder.mkdir()
    Image.fromarray(np.arange(30 * 60 * 3, dtype=np.uint32).reshape(30, 60, 3).astype(np.uint8)).save(
        folder / "cat.png"
    )
    write_video([np.full((48, 64, 3), 20 * i, np.uint8) for i in range(6)], folder / "clip.mp4", Fraction(10))
    write_audio(np.sin(np.arange(8_000) / 5).astype(np.float32) / 2, folder / "tone.flac")
    return folder


def make_tokenizer(folder: Path) -> Path:
    """A small tokenizer with the special tokens of Qwen2.5-Omni."""
    path = folder / "tokenizer.json"
    train_tokenizer(["the cat sat on the mat and looked at the dog user assistant system\n"] * 3, path)
    return path


def rules() -> MediaRules:
    return load_rules("qwen2_5_omni_thinker", {}, {})


def _rows() -> st.SearchStrategy[list[Any]]:
    row = st.one_of(
        st.sampled_from(ROWS).flatmap(hostile.broken), st.sampled_from(ROWS).flatmap(hostile.broken), hostile.VALUES
    )
    return st.lists(row, min_size=1, max_size=8)


def _lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _sound_files() -> list[bytes]:
    lines = _lines(list(ROWS))
    listed = json.dumps(list(ROWS), indent=1).encode()
    return [
        lines,
        listed,
        b"[" * 3000,
        b'{"a":' * 3000,
        lines.replace(b"cat.png", b"\\ud800"),
        b"1e999\n-0\n" + b"9" * 5000 + b"\n",
    ]


def _profiled(path: Path, media: Path, tokenizer: Path) -> None:
    """Profile all of a file, twice cut; every row once in one of the two lists, and both can be stored."""
    dataset = DatasetRef.of_file(path, media, tokenizer, 4096)
    opened = attempt(dataset.open)
    if opened is None:
        return
    first, second = (attempt(profile_shard, dataset, rules(), shard, 2) for shard in (0, 1))
    assert first is not None, "a file that opens can be profiled"
    assert second is not None, "a file that opens can be profiled"
    shapes, bad = [*first[0], *second[0]], [*first[1], *second[1]]
    assert sorted(r.sample_index for r in (*shapes, *bad)) == list(range(len(opened)))
    _stored(shapes, bad)


def _stored(shapes: list[SampleShape], bad: list[QuarantinedSample]) -> None:
    for row in bad:
        assert row.reason.strip(), "a reason without words"
        assert len(row.reason.splitlines()) == 1, "a reason of several lines"
        assert len(row.reason) < 1000, f"a reason of {len(row.reason)} characters"
    assert len(schema.to_table(SampleShape, shapes)) == len(shapes)
    assert len(schema.to_table(QuarantinedSample, bad)) == len(bad)


def _prepared(write: Callable[[Path, Any], Path | None]) -> Callable[[Path], Callable[[Any], None]]:
    """A check that writes an example below the folder it is given and profiles what it wrote."""

    def prepare(folder: Path) -> Callable[[Any], None]:
        media, tokenizer = make_media(folder / "media"), make_tokenizer(folder)

        def check(example: Any) -> None:
            work = folder / "work"
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            path = write(work, example)
            if path is not None:
                _profiled(path, media, tokenizer)

        return check

    return prepare


def _write_lines(work: Path, rows: list[Any]) -> Path:
    path = work / "a.jsonl"
    path.write_bytes(_lines(rows))
    return path


def _write_bytes(work: Path, example: tuple[str, bytes]) -> Path:
    name, data = example
    path = work / f"a{name}"
    path.write_bytes(data)
    return path


def _packed(kind: str) -> list[bytes]:
    lines = _lines(list(ROWS))
    return [gzip.compress(lines)] if kind == "gz" else [zstandard.ZstdCompressor().compress(lines)]


def _compressed() -> st.SearchStrategy[tuple[str, bytes]]:
    return st.one_of(
        st.tuples(st.just(".jsonl.gz"), hostile.broken_bytes(_packed("gz"))),
        st.tuples(st.just(".jsonl.zst"), hostile.broken_bytes(_packed("zst"))),
    )


def _write_parquet(work: Path, columns: dict[str, Any]) -> Path | None:
    """Columns as Parquet, where Arrow has a type for them at all."""
    try:
        arrays = {str(name): pa.array(values) for name, values in columns.items()}
        table = pa.table(arrays)
        path = work / "a.parquet"
        pq.write_table(table, path)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
        return None
    return path


def _columns() -> st.SearchStrategy[dict[str, Any]]:
    def of(row: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
        sound = {key: [value, value] for key, value in row.items()}
        sound["image"] = [{"bytes": b"no image", "path": "a.png"}, {"bytes": None, "path": "cat.png"}]
        return hostile.broken(
            sound, hostile.VALUES | st.binary(max_size=9) | st.lists(st.binary(max_size=4), max_size=3)
        )

    return st.sampled_from(ROWS).flatmap(of)


def _parquet_bytes() -> st.SearchStrategy[tuple[str, bytes]]:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": ["a", "b", "c"], "image": [b"x", b"y", None]}), sink)
    other = pa.BufferOutputStream()
    pq.write_table(pa.table({"messages": [ROWS[0]["conversations"]] * 3}), other, compression="zstd")
    files = [bytes(sink.getvalue().to_pybytes()), bytes(other.getvalue().to_pybytes())]
    return st.tuples(st.just(".parquet"), hostile.broken_bytes(files))


def _members() -> st.SearchStrategy[list[tuple[str, bytes]]]:
    names = st.sampled_from(
        (
            "a.json",
            "a.jpg",
            "a.txt",
            "b.png",
            "b.txt",
            "./c/d.json",
            "a.b.c",
            ".json",
            "../x.json",
            "/abs.txt",
            "a/" * 60,
        )
    )
    contents = st.one_of(
        hostile.broken_bytes([json.dumps(row).encode() for row in ROWS]), st.binary(max_size=30), st.just(b"hello"),
        st.just(b'{"caption": "hi"}'),
    )  # fmt: skip
    return st.lists(
        st.tuples(names | hostile.TEXTS.filter(lambda t: 0 < len(t) < 200), contents), min_size=1, max_size=6
    )


def _write_shard(work: Path, members: list[tuple[str, bytes]]) -> Path | None:
    try:
        return write_tar(work / "a.tar", members)
    except (ValueError, UnicodeError):
        return None  # a name that no tar can hold


def _tar_bytes() -> st.SearchStrategy[tuple[str, bytes]]:
    import io
    import tarfile

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in (("a.json", json.dumps(ROWS[0]).encode()), ("a.png", b"no"), ("b.txt", b"text")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return st.tuples(st.just(".tar"), hostile.broken_bytes([out.getvalue()]))


def _sizes_of(folder: Path) -> Callable[[Any], None]:
    media, tokenizer = make_media(folder / "media"), make_tokenizer(folder)

    def check(example: dict[str, Any]) -> None:
        path = _write_parquet(folder, example)
        if path is None:
            return
        dataset = DatasetRef.of_file(path, media, tokenizer, 4096)
        if dataset.sizes is None:
            return
        found = attempt(profile_sizes_shard, dataset, rules(), 0, 1)
        if found is not None:
            shapes, bad = found
            rows = [*shapes["sample_index"], *bad["sample_index"]]
            assert sorted(rows) == list(range(pq.ParquetFile(path).metadata.num_rows))
            wanted = schema.arrow_schema("sample_shape")
            shapes.to_arrow().select(wanted.names).cast(wanted)

    return check


TARGETS = (
    Target("rows", "rows of JSON Lines in every spelling, values of any type", _rows, _prepared(_write_lines)),
    Target(
        "rows-bytes",
        "bytes of JSON and JSON Lines files broken",
        lambda: st.tuples(st.sampled_from((".jsonl", ".json")), hostile.broken_bytes(_sound_files())),
        _prepared(_write_bytes),
    ),
    Target("rows-compressed", "gzip and zstandard files broken", _compressed, _prepared(_write_bytes)),
    Target("parquet-rows", "Parquet columns of any type", _columns, _prepared(_write_parquet)),
    Target("parquet-bytes", "bytes of Parquet files broken", _parquet_bytes, _prepared(_write_bytes)),
    Target("tar-members", "members of shards, their names and contents", _members, _prepared(_write_shard)),
    Target("tar-bytes", "bytes of shards broken", _tar_bytes, _prepared(_write_bytes)),
    Target("sizes", "tables of sizes with columns of any type", lambda: hostile.broken(_SIZES), _sizes_of),
)
