"""Training sets of strangers: rows of every format, the files that hold them, tables of sizes.

A row is never lost: it is in the profile or in quarantine, with a reason of one line, and both can be stored.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from fractions import Fraction
from functools import partial
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
from tests.fuzz.target import Strategy, Target, attempt, check_reason

ROWS: tuple[dict[str, Any], ...] = (
    {"id": "a", "image": "cat.png",
     "conversations": [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a"}]},
    {"id": 2, "messages": [{"role": "user", "content": [{"type": "text", "text": "see"},
                                                        {"type": "image_url", "image_url": {"url": "cat.png"}}]},
                           {"role": "assistant", "content": "b"}]},
    {"videos": ["clip.mp4"], "audio": "tone.flac", "system": "s",
     "conversations": {"from": ["human", "gpt"], "value": ["x <video><audio>", "y"]}},
    {"images": ["cat.png", "cat.png"], "texts": [{"user": "<image><image>", "assistant": "c"}]},
    {"instruction": "do", "input": "it", "output": "done", "history": [["q", "a"]]},
    {"text": "plain <image> text"},
)  # fmt: skip
SIZES: dict[str, list[Any]] = {
    "id": ["a", "b"], "prompt_tokens": [3, 4], "response_tokens": [5, 6], "turns": [1, 2], "image_w": [[640], []],
    "image_h": [[480], []], "video_w": [[64], []], "video_h": [[48], []], "video_frames": [[10], []],
    "video_fps": [[2.0], []], "video_seconds": [[5.0], []], "audio_seconds": [[1.5], []],
}  # fmt: skip


def make_media(folder: Path) -> Path:
    """A folder with `cat.png`, `clip.mp4` and `tone.flac`."""
    folder.mkdir()
    pixels = np.arange(30 * 60 * 3, dtype=np.uint32).reshape(30, 60, 3).astype(np.uint8)
    Image.fromarray(pixels).save(folder / "cat.png")
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


def prepare(folder: Path) -> Path:
    make_media(folder / "media")
    make_tokenizer(folder)
    return folder


def dataset_at(path: Path, folder: Path) -> DatasetRef:
    """The dataset of a file, with media and tokenizer of `prepare(folder)`."""
    return DatasetRef.of_file(path, folder / "media", folder / "tokenizer.json", 4096)


def _profiled(write: Callable[[Path, Any], Path | None]) -> Callable[[Path, Any], None]:
    """What an example is written as is profiled, cut in two; every row once in one of two lists that can be stored."""

    def check(folder: Path, example: Any) -> None:
        work = folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        path = write(work, example)
        dataset = dataset_at(path, folder) if path is not None else None
        opened = attempt(dataset.open) if dataset is not None else None
        if dataset is None or opened is None:
            return
        shards = [attempt(profile_shard, dataset, rules(), shard, 2) for shard in (0, 1)]
        assert None not in shards, "a file that opens can be profiled"
        shapes, bad = ([row for shard in shards if shard for row in shard[kind]] for kind in (0, 1))
        assert sorted(row.sample_index for row in (*shapes, *bad)) == list(range(len(opened)))
        for row in bad:
            check_reason(row.reason)
        assert len(schema.to_table(SampleShape, shapes)) == len(shapes)
        assert len(schema.to_table(QuarantinedSample, bad)) == len(bad)

    return check


def _rows() -> Strategy:
    row = st.sampled_from(ROWS).flatmap(hostile.broken)
    return st.lists(st.one_of(row, row, hostile.VALUES), min_size=1, max_size=8)


def _lines(rows: Any) -> bytes:
    return b"".join(hostile.as_json(row) + b"\n" for row in rows)


def _write_rows(work: Path, rows: list[Any]) -> Path:
    return _write_bytes(work, (".jsonl", _lines(rows)))


def _texts() -> Strategy:
    lines = _lines(ROWS)
    sound = [
        lines, json.dumps(list(ROWS), indent=1).encode(), b"[" * 3000, b'{"a":' * 3000,
        lines.replace(b"cat.png", b"\\ud800"), b"1e999\n-0\n" + b"9" * 5000 + b"\n",
    ]  # fmt: skip
    return st.tuples(st.sampled_from((".jsonl", ".json")), hostile.broken_bytes(sound))


def _bytes_of(suffix: str, *sound: bytes) -> Strategy:
    return st.tuples(st.just(suffix), hostile.broken_bytes(sound))


def _compressed() -> Strategy:
    packed = zstandard.ZstdCompressor().compress(_lines(ROWS))
    return _bytes_of(".jsonl.gz", gzip.compress(_lines(ROWS))) | _bytes_of(".jsonl.zst", packed)


def _write_bytes(work: Path, example: tuple[str, bytes]) -> Path:
    path = work / f"a{example[0]}"
    path.write_bytes(example[1])
    return path


def write_parquet(work: Path, columns: dict[str, Any], metadata: Any = None, **options: Any) -> Path | None:
    """Columns as Parquet, where Arrow has a type for them at all."""
    path = work / "a.parquet"
    try:
        table = pa.table({str(name): pa.array(values) for name, values in columns.items()})
        pq.write_table(table.replace_schema_metadata(metadata), path, **options)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
        return None
    return path


def _columns() -> Strategy:
    values = hostile.VALUES | st.binary(max_size=9) | st.lists(st.binary(max_size=4), max_size=3)
    images = [{"bytes": b"no image", "path": "a.png"}, {"bytes": None, "path": "cat.png"}]
    sound = [{**{key: [value, value] for key, value in row.items()}, "image": images} for row in ROWS]
    return st.sampled_from(sound).flatmap(lambda one: hostile.broken(one, values))


def _parquet_bytes() -> Strategy:
    found = []
    for columns, codec in (
        ({"text": ["a", "b", "c"], "image": [b"x", b"y", None]}, "snappy"),
        ({"messages": [ROWS[0]["conversations"]] * 3}, "zstd"),
    ):
        sink = io.BytesIO()
        pq.write_table(pa.table(columns), sink, compression=codec)
        found.append(sink.getvalue())
    return _bytes_of(".parquet", *found)


def _members() -> Strategy:
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
    ) | hostile.TEXTS.filter(lambda text: 0 < len(text) < 200)
    rows = hostile.broken_bytes([hostile.as_json(row) for row in ROWS])
    contents = rows | st.binary(max_size=30) | st.sampled_from((b"hello", b'{"caption": "hi"}'))
    return st.lists(st.tuples(names, contents), min_size=1, max_size=6)


def _write_shard(work: Path, members: list[tuple[str, bytes]]) -> Path | None:
    try:
        return write_tar(work / "a.tar", members)
    except (ValueError, UnicodeError):
        return None  # a name that no tar can hold


def _tar_bytes() -> Strategy:
    members = [("a.json", hostile.as_json(ROWS[0])), ("a.png", b"no"), ("b.txt", b"text")]
    with tempfile.TemporaryDirectory() as folder:
        return _bytes_of(".tar", write_tar(Path(folder) / "a.tar", members).read_bytes())


def _sizes(folder: Path, example: dict[str, Any]) -> None:
    path = write_parquet(folder, example)
    if path is None or (dataset := dataset_at(path, folder)).sizes is None:
        return
    found = attempt(profile_sizes_shard, dataset, rules(), 0, 1)
    if found is not None:
        shapes, bad = found
        rows = [*shapes["sample_index"], *bad["sample_index"]]
        assert sorted(rows) == list(range(pq.ParquetFile(path).metadata.num_rows))
        wanted = schema.arrow_schema("sample_shape")
        shapes.to_arrow().select(wanted.names).cast(wanted)


_target = partial(Target, prepare=prepare)
TARGETS = (
    _target("rows", "rows of JSON Lines in every spelling, values of any type", _rows, _profiled(_write_rows)),
    _target("rows-bytes", "bytes of JSON and JSON Lines files broken", _texts, _profiled(_write_bytes)),
    _target("rows-compressed", "gzip and zstandard files broken", _compressed, _profiled(_write_bytes)),
    _target("parquet-rows", "Parquet columns of any type", _columns, _profiled(write_parquet)),
    _target("parquet-bytes", "bytes of Parquet files broken", _parquet_bytes, _profiled(_write_bytes)),
    _target("tar-members", "members of shards, their names and contents", _members, _profiled(_write_shard)),
    _target("tar-bytes", "bytes of shards broken", _tar_bytes, _profiled(_write_bytes)),
    _target("sizes", "tables of sizes with columns of any type", lambda: hostile.broken(SIZES), _sizes),
)
