"""Rows straight from the spool, without a database."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from dflop.store import schema
from dflop.store.spool import SpoolKey, list_files


def read_spool(root: Path | str, cls: type) -> list[Any]:
    """Every record of a class, in order of keys: the reference that the database must equal."""
    kind = schema.kind_of(cls)
    found = sorted((key, path) for name, path in list_files(root, kind) if (key := SpoolKey.parse(name)))
    tables = [pq.ParquetFile(path).read() for _, path in found]
    upgraded = [schema.upgrade(kind, schema.file_version(table.schema.metadata), table) for table in tables]
    return [row for table in upgraded for row in schema.from_table(cls, table)]
