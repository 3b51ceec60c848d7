"""Datasets in the layouts of other programs, small."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import zstandard
from PIL import Image

from tests.data.containers import write_tar


def _picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    return file.getvalue()


PICTURE = _picture()


def write_json(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def rows(path: Path, number: int) -> Path:
    """A file with rows of a conversation, as its suffix says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = [{"id": f"{path.name}-{n}", "prompt": "What?", "completion": "That."} for n in range(number)]
    lines = "".join(json.dumps(row) + "\n" for row in found).encode()
    if path.suffix == ".parquet":
        pl.DataFrame(found).write_parquet(path)
    elif path.suffix in (".csv", ".tsv"):
        pl.DataFrame(found).write_csv(path, separator="," if path.suffix == ".csv" else "\t")
    elif path.suffix == ".json":
        path.write_text(json.dumps(found))
    else:
        packed = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
        path.write_bytes(packed.get(path.suffix, bytes)(lines))
    return path


def pictures(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(PICTURE)


def shards(folder: Path, number: int, name: str = "s-{}.tar") -> list[Path]:
    """Tar files of two rows each, a picture and its caption."""
    made = []
    for n in range(number):
        members = [
            (f"k{n}{row}.{ext}", content) for row in range(2) for ext, content in (("jpg", PICTURE), ("txt", b"It."))
        ]
        made.append(write_tar(folder / name.format(n), members))
    return made


def save_to_disk(folder: Path, splits: dict[str, int], *, stream: bool = True) -> None:
    """What `DatasetDict.save_to_disk` writes."""
    write_json(folder / "dataset_dict.json", {"splits": list(splits)})
    for split, number in splits.items():
        messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
        table = pa.table({"images": [[{"bytes": PICTURE, "path": None}]] * number, "messages": [messages] * number})
        (folder / split).mkdir(parents=True)
        path = folder / split / "data-00000-of-00001.arrow"
        write = pa.ipc.new_stream if stream else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as file, write(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
        names = ("_format_type", "_format_columns", "_output_all_columns")
        state = {
            "_data_files": [{"filename": path.name}],
            "_split": split,
            "_fingerprint": "x",
            **dict.fromkeys(names),
            "_format_kwargs": {},
        }
        write_json(folder / split / "state.json", state)
        write_json(folder / split / "dataset_info.json", {"description": ""})
