"""Which files each snapshot was the first to hold: small Parquet files that outlive the snapshots and the database.

    <store>/publishes/<seq>.parquet    kind, run_id, producer, seq of the spool files new in snapshot <seq>

With them the content of any snapshot ever published can be made again from the spool, after its file was collected and
even after the live database was lost: what a plan or a training run has read stays reproducible.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dflop.errors import StoreError
from dflop.store import durable
from dflop.store.spool import SpoolKey

_FILE = re.compile(r"(\d{6,})\.parquet")


@dataclass(frozen=True, slots=True)
class Publish:
    """One publish."""

    seq: int
    revision: str
    duckdb: str
    published_at_s: float
    keys: tuple[SpoolKey, ...]
    """Files that no earlier snapshot held."""


def append(store_root: Path, publish: Publish) -> None:
    """Writes a publish down.

    Raises:
        FileExistsError: This number was published before.
    """
    fields = ("kind", "run_id", "producer", "seq")
    columns = {name: [getattr(key, name) for key in publish.keys] for name in fields}
    types = pa.schema([("kind", pa.string()), ("run_id", pa.string()), ("producer", pa.string()), ("seq", pa.int64())])
    metadata = {
        "revision": publish.revision,
        "duckdb": publish.duckdb,
        "published_at_s": repr(publish.published_at_s),
    }
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, schema=types).replace_schema_metadata(metadata), sink, compression="zstd")
    path = _folder(store_root) / f"{publish.seq:06d}.parquet"
    durable.make_folder(path.parent)
    durable.write_new(path, bytes(sink.getvalue().to_pybytes()))


def last_seq(store_root: Path) -> int:
    """Number of the newest publish that was written down; 0 before the first."""
    return max((seq for seq, _ in _list(store_root)), default=0)


def read(store_root: Path, *, after_seq: int = 0) -> Iterable[Publish]:
    """Publishes with a higher number than `after_seq`, in order.

    Raises:
        StoreError: A file of the log is damaged.
    """
    for seq, path in sorted(_list(store_root)):
        if seq > after_seq:
            yield _read(seq, path)


def _read(seq: int, path: Path) -> Publish:
    try:
        table = pq.ParquetFile(path).read()
        found = {k.decode(): v.decode() for k, v in table.schema.metadata.items()}
        keys = tuple(SpoolKey(**row) for row in table.to_pylist())
        return Publish(seq, found["revision"], found["duckdb"], float(found["published_at_s"]), keys)
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise StoreError(
            f"the log of snapshot {seq} is damaged: {str(error).splitlines()[0]}",
            where=str(path),
            hint="remove it: only the content of snapshots from there on can then not be made again one by one",
        ) from error


def _list(store_root: Path) -> list[tuple[int, Path]]:
    folder = _folder(store_root)
    if not folder.is_dir():
        return []
    return [(int(m[1]), path) for path in folder.iterdir() if (m := _FILE.fullmatch(path.name))]


def _folder(store_root: Path) -> Path:
    return store_root / "publishes"
