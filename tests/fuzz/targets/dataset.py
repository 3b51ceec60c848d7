"""Training sets of strangers: rows of every format, the files that hold them, tables of sizes.

A row is never lost: it is in the profile or in quarantine, with a reason of one line, and both can be stored.
"""

import contextlib
import gzip
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from hypothesis import strategies as st

from dflop.data.annotations import BadSample
from dflop.data.dataset_profile import DatasetRef, profile_shard
from dflop.data.row_keys import FOLLOWED
from dflop.records import QuarantinedSample, SampleShape
from dflop.store import schema
from tests.data.containers import write_tar
from tests.data.helpers import make_tokenizer
from tests.fuzz import hostile
from tests.fuzz.hostile import as_json
from tests.fuzz.target import Strategy, Target, attempt, check_reason, made
from tests.fuzz.targets.media import rules, samples

ROWS: tuple[dict[str, Any], ...] = (
    {"id": "a", "image": "rgb.png",
     "conversations": [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a"}]},
    {"id": 2, "messages": [{"role": "user", "content": [{"type": "text", "text": "see"},
                                                        {"type": "image_url", "image_url": {"url": "rgb.png"}}]},
                           {"role": "assistant", "content": "b"}]},
    {"videos": ["clip.mp4"], "audio": "tone.flac", "system": "s",
     "conversations": {"from": ["human", "gpt"], "value": ["x <video><audio>", "y"]}},
    {"images": ["rgb.png", "rgb.png"], "texts": [{"user": "<image><image>", "assistant": "c"}]},
    {"instruction": "do", "input": "it", "output": "done", "history": [["q", "a"]]},
    {"text": "plain <image> text"},
)  # fmt: skip
SIZES: dict[str, list[Any]] = {
    "id": ["a", "b"], "prompt_tokens": [3, 4], "response_tokens": [5, 6], "turns": [1, 2], "image_w": [[640], []],
    "image_h": [[480], []], "video_w": [[64], []], "video_h": [[48], []], "video_frames": [[10], []],
    "video_fps": [[2.0], []], "video_seconds": [[5.0], []], "audio_seconds": [[1.5], []],
}  # fmt: skip


def prepare(folder: Path) -> Path:
    """Media and a tokenizer."""
    shutil.copytree(made(samples), folder / "media")
    make_tokenizer(folder)
    return folder


def dataset_at(path: Path, folder: Path) -> DatasetRef:
    """The dataset of a file, with what is in `prepare(folder)`."""
    return DatasetRef.of_file(path, folder / "media", folder / "tokenizer.json", 4096)


def _profile(folder: Path, path: Path) -> None:
    """All of a file, cut in two; every row once in one of two lists, and both can be stored."""
    dataset = dataset_at(path, folder)
    opened = attempt(dataset.open)
    if opened is None:
        return
    for index in range(len(opened)):
        with contextlib.suppress(BadSample):
            sample = opened.sample(index)
            places = [piece for turn in sample.turns for piece in turn.pieces()[1::2]]
            assert places == [ref.kind for ref in sample.media], "a place for each item, and an item for each place"
            assert all(ref.path for ref in sample.media)
    shards = [attempt(profile_shard, dataset, rules(), shard, 2) for shard in (0, 1)]
    assert None not in shards, "a file that opens can be profiled"
    shapes, bad = ([row for shard in shards if shard for row in shard[kind]] for kind in (0, 1))
    assert sorted(row.sample_index for row in (*shapes, *bad)) == list(range(len(opened)))
    for row in bad:
        check_reason(row.reason)
    assert len(schema.to_table(SampleShape, shapes)) == len(shapes)
    assert len(schema.to_table(QuarantinedSample, bad)) == len(bad)


def _lines(rows: Any) -> bytes:
    return b"".join(as_json(row) + b"\n" for row in rows)


def _write_bytes(work: Path, example: tuple[str, bytes]) -> Path:
    (work / f"a{example[0]}").write_bytes(example[1])
    return work / f"a{example[0]}"


def write_parquet(work: Path, columns: dict[str, Any], metadata: Any = None) -> Path | None:
    """Columns as Parquet, where Arrow has a type for them at all."""
    try:
        table = pa.table({str(name): pa.array(values) for name, values in columns.items()})
        pq.write_table(table.replace_schema_metadata(metadata), work / "a.parquet")
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
        return None
    return work / "a.parquet"


def _write_shard(work: Path, members: list[tuple[str, bytes]]) -> Path | None:
    try:
        return write_tar(work / "a.tar", members)
    except (ValueError, UnicodeError):
        return None  # a name that no tar can hold


def _sizes(folder: Path, example: dict[str, Any]) -> None:
    path = write_parquet(folder, example)
    if path is None or (dataset := dataset_at(path, folder)).sizes is None:
        return
    if (found := attempt(profile_shard, dataset, rules(), 0, 1)) is not None:
        rows = [row.sample_index for rows in found for row in rows]
        assert sorted(rows) == list(range(pq.ParquetFile(path).metadata.num_rows))
        schema.to_table(SampleShape, found[0])


def _parquet(columns: dict[str, Any], codec: str) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, compression=codec)
    return sink.getvalue()


def _tar(folder: Path) -> None:
    write_tar(folder / "a.tar", [("a.json", as_json(ROWS[0])), ("a.png", b"no"), ("b.txt", b"text")])


def _files(suffix: str, *sound: bytes) -> Strategy:
    return st.tuples(st.just(suffix), hostile.broken_bytes(*sound))


_ROW, _LINES = hostile.one_broken(ROWS), _lines(ROWS)
_KEYED = st.dictionaries(st.sampled_from(sorted(FOLLOWED["row"])), hostile.VALUES, max_size=6)
_TEXTS = (_LINES, json.dumps(list(ROWS), indent=1).encode(), b"[" * 3000, b'{"a":' * 3000,
          _LINES.replace(b"rgb.png", b"\\ud800"), b"1e999\n-0\n" + b"9" * 5000 + b"\n")  # fmt: skip
_ZSTD = zstandard.ZstdCompressor().compress(_LINES)
_IMAGES = [{"bytes": b"no image", "path": "a.png"}, {"bytes": None, "path": "rgb.png"}]
_COLUMNS = [{**{key: [value, value] for key, value in row.items()}, "image": _IMAGES} for row in ROWS]
_CELLS = hostile.VALUES | st.binary(max_size=9) | st.lists(st.binary(max_size=4), max_size=3)
_NAMES = st.sampled_from(
    ("a.json", "a.jpg", "a.txt", "b.png", "b.txt", "./c/d.json", "a.b.c", ".json", "../x.json", "/abs.txt", "a/" * 60)
) | hostile.TEXTS.filter(lambda text: 0 < len(text) < 200)
_CONTENTS = st.one_of(hostile.broken_bytes(*map(as_json, ROWS)), st.binary(max_size=30),
                      st.sampled_from((b"hello", b'{"caption": "hi"}')))  # fmt: skip
_PARQUET = _files(
    ".parquet", _parquet({"text": ["a", "b", "c"], "image": [b"x", b"y", None]}, "snappy"),
    _parquet({"messages": [ROWS[0]["conversations"]] * 3}, "zstd"),
)  # fmt: skip


def _target(
    name: str, what: str, examples: Strategy, write: Callable[[Path, Any], Path | None], **options: Any
) -> Target:  # fmt: skip
    """Profiles what examples are written as."""

    def check(folder: Path, example: Any) -> None:
        work = folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        if (path := write(work, example)) is not None:
            _profile(folder, path)

    return Target(name, what, examples, check, prepare, **options)


TARGETS = (
    _target("rows", "rows of JSON Lines in every spelling, values of any type",
            st.lists(st.one_of(_ROW, _ROW, _KEYED, hostile.VALUES), min_size=1, max_size=8),
            lambda work, rows: _write_bytes(work, (".jsonl", _lines(rows))), quick=24),
    _target("rows-bytes", "bytes of JSON and JSON Lines files broken",
            _files(".jsonl", *_TEXTS) | _files(".json", *_TEXTS), _write_bytes),
    _target("rows-compressed", "gzip and zstandard files broken",
            _files(".jsonl.gz", gzip.compress(_LINES)) | _files(".jsonl.zst", _ZSTD), _write_bytes),
    _target("parquet-rows", "Parquet columns of any type", hostile.one_broken(_COLUMNS, _CELLS), write_parquet),
    _target("parquet-bytes", "bytes of Parquet files broken", _PARQUET, _write_bytes),
    _target("tar-members", "members of shards, their names and contents",
            st.lists(st.tuples(_NAMES, _CONTENTS), min_size=1, max_size=6), _write_shard),
    _target("tar-bytes", "bytes of shards broken", 
            st.deferred(lambda: _files(".tar", (made(_tar) / "a.tar").read_bytes())), _write_bytes),
    Target("sizes", "tables of sizes with columns of any type", hostile.broken(SIZES), _sizes, prepare),
)  # fmt: skip
