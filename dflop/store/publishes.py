"""Which files each snapshot was the first to hold: small Parquet files that outlive the snapshots and the database.

With them any snapshot can be made again from the spool, even after it was collected and the live database was lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from dflop.errors import StoreError
from dflop.records import to_dict
from dflop.store import durable
from dflop.store.spool import SpoolKey

FOLDER = "publishes"


@dataclass(frozen=True, slots=True)
class Publish:
    """One publish."""

    seq: int
    revision: str
    duckdb: str
    published_at_s: float
    keys: tuple[SpoolKey, ...] = ()
    """Files that no earlier snapshot held."""


def append(store_root: Path, publish: Publish) -> None:
    """Writes a publish down, under a number that was not published before."""
    metadata = {name: str(getattr(publish, name)) for name in ("revision", "duckdb", "published_at_s")}
    path = store_root / FOLDER / f"{publish.seq:06d}.parquet"
    durable.make_folder(path.parent)
    durable.write_new(path, durable.parquet(table_of(publish.keys), metadata))


def note(con: duckdb.DuckDBPyConnection, publish: Publish) -> None:
    """Adds a publish to the table `publish_log`, where it is not there yet."""
    columns = "(seq, published_at_s, duckdb_version, revision)"
    values = [publish.seq, publish.published_at_s, publish.duckdb, publish.revision]
    con.execute(f"insert or ignore into publish_log {columns} values (?, ?, ?, ?)", values)


def table_of(keys: Sequence[SpoolKey]) -> pa.Table:
    """Keys as a table of their own columns."""
    types = {"kind": pa.string(), "run_id": pa.string(), "producer": pa.string(), "seq": pa.int64()}
    return pa.Table.from_pylist([to_dict(key) for key in keys], schema=pa.schema(types))


def last_seq(store_root: Path) -> int:
    """Number of the newest publish that was written down; 0 before the first."""
    return max(durable.numbered(store_root / FOLDER, ".parquet"), default=0)


def read(store_root: Path) -> Iterator[Publish]:
    """Every publish, in order.

    Raises:
        StoreError: A file of the log is damaged.
    """
    for seq, path in durable.numbered(store_root / FOLDER, ".parquet").items():
        try:
            table = pq.ParquetFile(path).read()
            found = {k.decode(): v.decode() for k, v in table.schema.metadata.items()}
            keys = tuple(SpoolKey(**row) for row in table.to_pylist())
            publish = Publish(seq, found["revision"], found["duckdb"], float(found["published_at_s"]), keys)
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
            problem = f"the log of snapshot {seq} is damaged: {str(error).splitlines()[0]}"
            hint = "remove it; later snapshots can then not be rebuilt individually"
            raise StoreError(problem, where=str(path), hint=hint) from error
        yield publish
