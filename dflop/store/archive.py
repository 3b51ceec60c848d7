"""Compacted spool files: many small files of one kind and run, rewritten as one, their identities kept.

An archive file, which holds the rows in the order of their files, is as much truth as the spool: it names every file it
replaces, with its hash, size, time and rows, so a rebuild gives the same rows and the same manifest as from the files.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dflop.errors import StoreError
from dflop.records import parse_json
from dflop.store import durable, schema
from dflop.store.file_check import Good, StoredFile, with_provenance
from dflop.store.spool import NEXT_SEQ_FILE, SpoolKey, read_next_seq

_MEMBERS = b"dflop.archive_members"


def list_archive(store_root: Path) -> list[StoredFile]:
    """Every compacted file of the store."""
    root = store_root / "archive"
    return [StoredFile.of(root, path) for path in durable.list_parquet(root)]


def write(store_root: Path, kind: str, run_id: str, files: Sequence[Good]) -> StoredFile:
    """Writes files of one kind and run as one; removes nothing."""
    folder = store_root / "archive" / kind / run_id
    durable.make_folder(folder)
    # Before the files go: a producer that comes back must not use one of their numbers again.
    used = read_next_seq(folder)
    for g in files:
        used[g.key.producer] = max(used.get(g.key.producer, 0), g.key.seq + 1)
    durable.replace(folder / NEXT_SEQ_FILE, json.dumps(used).encode())
    table = with_provenance(files).drop_columns(["_run_id"])
    members = [
        [g.key.producer, g.key.seq, g.sha256, g.file.num_bytes, g.file.mtime_ns, g.table.num_rows] for g in files
    ]
    metadata = {
        "dflop.kind": kind, "dflop.run_id": run_id, schema.VERSION_KEY: str(schema.version_of(kind)),
        _MEMBERS: json.dumps(members),
    }  # fmt: skip
    path = folder / f"{max(durable.numbered(folder, '.parquet'), default=-1) + 1:06d}.parquet"
    durable.write_new(path, durable.parquet(table, metadata))
    return StoredFile.of(store_root / "archive", path)


def read(file: StoredFile) -> tuple[str, tuple[Good, ...]]:
    """Hash of a compacted file, and the spool files in it as they were when they were compacted, in today's schema.

    Raises:
        StoreError: The file is damaged, or of a newer dflop. Nothing replaces it: restore it from a backup.
    """
    data = file.path.read_bytes()
    try:
        reader = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        found: dict[bytes, bytes] = reader.metadata.metadata or {}
        kind, run_id = found[b"dflop.kind"].decode(), found[b"dflop.run_id"].decode()
        version = schema.file_version(found)
        if kind not in schema.KINDS.keys() | schema.RETIRED or version > schema.version_of(kind):
            raise ValueError(f"kind `{kind}`, schema version {version}: written by a newer dflop")
        table = reader.read()
        files = tuple(_members(kind, run_id, version, table, parse_json(found[_MEMBERS]), file.path))
    except (KeyError, ValueError, TypeError, OSError, pa.ArrowException) as error:
        problem = f"cannot read the compacted file: {str(error).splitlines()[0]}"
        hint = "upgrade dflop if it is older than the store, else restore the file from a backup"
        raise StoreError(problem, where=str(file.path), hint=hint) from error
    return hashlib.sha256(data).hexdigest(), files


def note(con: duckdb.DuckDBPyConnection, file: StoredFile, sha256: str, files: Sequence[Good]) -> None:
    """Notes that every spool file in a compacted file is in the manifest; part of the caller's transaction."""
    num_rows = sum(g.table.num_rows for g in files)
    row = [file.name, sha256, file.num_bytes, file.mtime_ns, len(files), num_rows, time.time()]
    con.execute("insert or replace into archive_manifest values (?, ?, ?, ?, ?, ?, ?)", row)


def _members(kind: str, run_id: str, version: int, table: pa.Table, members: list[list[Any]], path: Path) -> list[Good]:
    if sum(m[-1] for m in members) != table.num_rows:
        raise ValueError(f"{table.num_rows} rows found, the footer has {sum(m[-1] for m in members)}")
    good, start = [], 0
    for producer, seq, sha256, num_bytes, mtime_ns, num_rows in members:
        part = table.slice(start, num_rows)
        start += num_rows
        if num_rows and pc.unique(part["_seq"]).to_pylist() != [seq]:
            raise ValueError(f"rows of {producer}-{seq} are not at the position in the footer")
        rows = schema.upgrade(kind, version, part.drop_columns(["_producer", "_seq"]))
        key = SpoolKey(kind, run_id, producer, seq)
        good.append(Good(StoredFile(key.relative_path, path, num_bytes, mtime_ns), key, sha256, rows))
    return good
