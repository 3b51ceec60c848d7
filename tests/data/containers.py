"""Training data in containers, written with libraries other than the ones that read them."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from dflop.data.annotations import MediaRef
from dflop.data.formats.row_source import RowSource
from tests.data.helpers import chat

ROWS: list[dict[str, Any]] = [
    chat("what is this?", "a cat", id="0", image="cat.png"),
    chat("<video> and <image>?", "a clip, a cat", "then?", "nothing", id="1", image="cat.png", video="clip.mp4"),
    chat("listen", "a tone", id="2", audio="tone.flac"),
    chat("hello", "hi", id="3"),
    chat("two", "cats", id="4", image=["cat.png", "cat.png"]),
]


def write_tar(path: Path, members: list[tuple[str, bytes]], **options: Any) -> Path:
    with tarfile.open(path, "w", **options) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def tar_of(rows: list[dict[str, Any]], media_root: Path, path: Path, **options: Any) -> Path:
    """Every row as members `<id>.json` and `<id>.<number>.<suffix>`."""
    members = []
    for row in rows:
        for kind in ("image", "video", "audio"):
            for number, name in enumerate(listed(row.get(kind))):
                members.append((f"{row['id']}.{number}{Path(name).suffix}", (media_root / name).read_bytes()))
        members.append((f"{row['id']}.json", json.dumps(row).encode()))
    return write_tar(path, members, **options)


def parquet_of(rows: list[dict[str, Any]], media_root: Path, path: Path, *, embed: bool, row_group_size: int) -> Path:
    """`conversations` as a list of structs; media as {bytes, path}, embedded or not."""

    def column(kind: str) -> pa.Array:
        media = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        values = [
            [
                {"bytes": (media_root / name).read_bytes() if embed else None, "path": name}
                for name in listed(row.get(kind))
            ]
            for row in rows
        ]
        if kind == "video":  # at most one: a plain struct, null where there is none
            return pa.array([v[0] if v else None for v in values], media)
        return pa.array(values, pa.list_(media))

    turn = pa.struct({"from": pa.string(), "value": pa.string()})
    table = pa.table(
        {
            "id": [row["id"] for row in rows],
            "conversations": pa.array([row["conversations"] for row in rows], pa.list_(turn)),
            "images": column("image"), "video": column("video"), "audios": column("audio"),
            "split": ["train"] * len(rows),
        }
    )  # fmt: skip
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


def jsonl_of(rows: list[dict[str, Any]], path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def content_of(source: RowSource, media_root: Path, index: int) -> tuple[Any, ...]:
    """Id, turns, and kind and bytes of every media item of a row."""
    sample = source.sample(index)
    media = [(ref.kind, content(source, index, ref, media_root)) for ref in sample.media]
    return sample.sample_index, sample.sample_id, sample.turns, media


def content(source: RowSource, index: int, ref: MediaRef, media_root: Path) -> bytes:
    opened = source.open_media(index, ref, media_root)
    assert source.embeds(ref) != isinstance(opened, Path)
    return read(opened)


def read(opened: Path | BinaryIO) -> bytes:
    if isinstance(opened, Path):
        return opened.read_bytes()
    with opened:
        return opened.read()


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
