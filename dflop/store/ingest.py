"""Turns spool files into rows of the live database, each exactly once, and publishes a snapshot.

One pass: list the spool, leave out what the manifest knows, read and check each file on its own (one truncated file
must not fail its neighbours), insert up to 500 files with their manifest rows in one transaction, read the manifest
back, publish. A file that fails a check moves to `<store>/quarantine` and leaves a row saying why. Killed anywhere,
the next pass continues: a file is in the manifest together with its rows, or not at all.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from dflop import units
from dflop.errors import StoreError
from dflop.store import durable, live, schema, snapshot
from dflop.store.spool import SpoolKey, list_files

BATCH_FILES = 500
BATCH_BYTES = 64 << 20

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What one pass did."""

    num_files: int
    num_rows: int
    num_quarantined_files: int
    snapshot_seq: int
    """Newest snapshot after the pass, also when this pass had nothing to publish."""
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class _SpoolFile:
    name: str
    """Path below `spool/`."""
    path: Path
    num_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class _Ingested:
    sha256: str
    num_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class _Good:
    file: _SpoolFile
    key: SpoolKey
    sha256: str
    table: pa.Table


@dataclass(frozen=True, slots=True)
class _Bad:
    file: _SpoolFile
    sha256: str
    reason: str


def ingest(
    store_root: Path | str, progress: Progress | None = None, *, lock_timeout_s: float = live.LOCK_TIMEOUT_S
) -> IngestReport:
    """Ingests every new spool file and publishes a snapshot if anything changed; doing it again changes nothing.

    Args:
        store_root: Folder of the store; created when missing.
        progress: Called with a line per batch and per quarantined file.
        lock_timeout_s: How long to wait for another ingester.

    Raises:
        StoreError: Another ingester holds the lock, a file cannot be read, the disk is full, or DuckDB failed. What was
            committed before stays; the next pass continues from there.
    """
    start_s = time.monotonic()
    root = Path(store_root)
    say = progress or (lambda _line: None)
    num_files = num_rows = num_bad = 0
    try:
        with live.open_live(root, lock_timeout_s=lock_timeout_s) as con:
            manifest = _manifest(con)
            for batch in _batches(_pending(root, manifest)):
                good, bad = _read_batch(batch, manifest)
                rows = _insert(con, good, bad)
                _quarantine(root, bad, say)
                num_files, num_rows, num_bad = num_files + len(good), num_rows + rows, num_bad + len(bad)
                say(f"ingested {units.count(num_rows)} rows of {num_files} files")
            seq = snapshot.publish_if_stale(con, root)
    except (duckdb.Error, OSError) as error:
        raise StoreError(f"ingest failed: {error}", where=str(root), hint="nothing is lost; ingest again") from error
    return IngestReport(num_files, num_rows, num_bad, seq, time.monotonic() - start_s)


def _manifest(con: duckdb.DuckDBPyConnection) -> dict[SpoolKey, _Ingested]:
    rows = con.execute(
        "select kind, run_id, producer, seq, sha256, num_bytes, mtime_ns from ingest_manifest"
    ).fetchall()
    return {SpoolKey(*row[:4]): _Ingested(*row[4:]) for row in rows}


def _pending(root: Path, manifest: dict[SpoolKey, _Ingested]) -> list[_SpoolFile]:
    """Files the manifest does not know with this size and time; hashing every file in every pass would not scale."""
    pending = []
    for name, path in list_files(root):
        stat, key = path.stat(), SpoolKey.parse(name)
        ingested = manifest.get(key) if key else None
        if not ingested or (ingested.num_bytes, ingested.mtime_ns) != (stat.st_size, stat.st_mtime_ns):
            pending.append(_SpoolFile(name, path, stat.st_size, stat.st_mtime_ns))
    return pending


def _batches(files: list[_SpoolFile]) -> Iterator[list[_SpoolFile]]:
    batch: list[_SpoolFile] = []
    num_bytes = 0
    for file in files:
        batch.append(file)
        num_bytes += file.num_bytes
        if len(batch) == BATCH_FILES or num_bytes > BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _read_batch(batch: list[_SpoolFile], manifest: dict[SpoolKey, _Ingested]) -> tuple[list[_Good], list[_Bad]]:
    good: list[_Good] = []
    bad: list[_Bad] = []
    for file in batch:
        data = file.path.read_bytes()
        sha256 = hashlib.sha256(data).hexdigest()
        key = SpoolKey.parse(file.name)
        ingested = manifest.get(key) if key else None
        if ingested and ingested.sha256 == sha256:
            continue  # copied or touched since, content unchanged
        try:
            if key is None or key.kind not in schema.KINDS:
                raise ValueError("not a path <kind>/<run_id>/<producer>-<seq>.parquet of a known kind")
            if ingested:
                raise ValueError(f"content differs from what was ingested under this name (sha256 {ingested.sha256})")
            good.append(_Good(file, key, sha256, _decode(key, data)))
        except (ValueError, OSError, pa.ArrowException) as error:  # the bytes are in memory: OSError is corrupt Parquet
            bad.append(_Bad(file, sha256, str(error).splitlines()[0]))
    return good, bad


def _decode(key: SpoolKey, data: bytes) -> pa.Table:
    """Table of a spool file with its provenance columns; ValueError or ArrowException says what is wrong with it."""
    reader = pq.ParquetFile(pa.BufferReader(data))
    found = reader.metadata.metadata or {}
    for name, expected in key.metadata.items():
        if found.get(name) != expected:
            raise ValueError(f"{name.decode()} in the file is {found.get(name)!r}, expected {expected!r}")
    table = reader.read()
    expected_schema = schema.arrow_schema(key.kind)
    if not table.schema.equals(expected_schema):
        raise ValueError(f"columns {table.schema.names} do not match schema version {schema.SCHEMA_VERSION}")
    if table.num_rows != reader.metadata.num_rows:
        raise ValueError(f"{table.num_rows} rows found, footer says {reader.metadata.num_rows}")
    nulls = [name for name in table.schema.names if table.column(name).null_count]
    if nulls:
        raise ValueError(f"columns {nulls} hold nulls")
    for column, value in (("_run_id", key.run_id), ("_producer", key.producer), ("_seq", key.seq)):
        table = table.append_column(column, pa.repeat(pa.scalar(value), table.num_rows))
    return table


def _insert(con: duckdb.DuckDBPyConnection, good: list[_Good], bad: list[_Bad]) -> int:
    """Commits rows, manifest and quarantine entries of one batch together; returns the number of rows."""
    if not good and not bad:
        return 0
    now_s = time.time()
    manifest = pa.Table.from_pylist(
        [
            {
                "kind": g.key.kind, "run_id": g.key.run_id, "producer": g.key.producer, "seq": g.key.seq,
                "sha256": g.sha256, "num_bytes": g.file.num_bytes, "mtime_ns": g.file.mtime_ns,
                "num_rows": g.table.num_rows, "ingested_at_s": now_s,
            }
            for g in good
        ]
    )  # fmt: skip
    with live.transaction(con):
        for kind in sorted({g.key.kind for g in good}):
            _insert_table(con, kind, pa.concat_tables([g.table for g in good if g.key.kind == kind]))
        if good:
            _insert_table(con, "ingest_manifest", manifest)
        for b in bad:
            con.execute(
                "insert or replace into file_quarantine values (?, ?, ?, ?, ?)",
                [b.file.name, b.sha256, b.file.num_bytes, b.reason, now_s],
            )
        live.touch(con)
    if good:
        _verify(con, manifest)
    return sum(g.table.num_rows for g in good)


def _insert_table(con: duckdb.DuckDBPyConnection, name: str, rows: pa.Table) -> None:
    con.register("_incoming", rows)
    try:
        con.execute(f'insert into "{name}" by name select * from _incoming')
    finally:
        con.unregister("_incoming")


def _verify(con: duckdb.DuckDBPyConnection, manifest: pa.Table) -> None:
    # COMMIT can report success and commit nothing: believe only what can be read back.
    con.register("_incoming", manifest)
    try:
        (found,) = con.execute(
            "select count(*) from ingest_manifest semi join _incoming using (kind, run_id, producer, seq, sha256)"
        ).fetchall()[0]
    finally:
        con.unregister("_incoming")
    if found != manifest.num_rows:
        raise StoreError(f"a commit reported success but left {found} of {manifest.num_rows} manifest rows")


def _quarantine(root: Path, bad: list[_Bad], say: Progress) -> None:
    for b in bad:
        target = root / "quarantine" / f"{b.file.name}.{b.sha256[:12]}"
        durable.make_folder(target.parent)
        os.replace(b.file.path, target)
        say(f"quarantined {b.file.name}: {b.reason}")
