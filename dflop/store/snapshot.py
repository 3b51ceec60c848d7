"""Read-only copies of the live database, one file per publish, that everyone else reads.

    <store>/snapshots/dflop-<seq>.duckdb   mode 0444, storage version 1.4: every duckdb client in use opens it
    <store>/CURRENT                        JSON {seq, file, sha256, revision, ...}: what programs follow
    <store>/current.duckdb                 relative link, for people: `duckdb -readonly current.duckdb`

A snapshot always gets a new name: DuckDB caches databases by path, so a file renamed over a fixed name would go
unseen by a process that has the old one open. A copy costs 1.9 s per 79 MB and leaves no WAL behind.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from dflop.errors import StoreError
from dflop.store import durable, live

STORAGE_VERSION = "v1.4.0"
KEEP = 5
GRACE_S = 3600.0
"""Snapshots older than the newest `KEEP` stay at least this long for queries that run on them."""

# One configuration for every snapshot connection: DuckDB refuses a second, different one on the same file in a process.
# Nothing outside the file can be reached, nothing spills to disk, and none of it can be changed from SQL.
READ_CONFIG: dict[str, Any] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
    "temp_directory": "",
    "memory_limit": "4GiB",
    "threads": "4",
    "lock_configuration": "true",
}


@dataclass(frozen=True, slots=True)
class Current:
    """Content of CURRENT: which snapshot is the newest."""

    seq: int
    file: str
    """Relative to the store."""
    sha256: str
    revision: str
    """Content identity of the live database it was copied from."""
    duckdb: str
    published_at_s: float


def read_current(store_root: Path | str) -> Current | None:
    """The newest published snapshot; None before the first.

    Raises:
        StoreError: CURRENT is no JSON object of the expected fields.
    """
    path = Path(store_root) / "CURRENT"
    try:
        return Current(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise StoreError(f"CURRENT is damaged: {error}", where=str(path), hint="remove it and ingest again") from error


def open_current(store_root: Path | str) -> tuple[duckdb.DuckDBPyConnection, int]:
    """Opens the newest snapshot read-only; returns the connection and the snapshot's sequence number.

    Raises:
        StoreError: Nothing was published yet, or the file cannot be opened.
    """
    current = read_current(store_root)
    if current is None:
        raise StoreError(
            "the store has no snapshot yet",
            where=str(store_root),
            hint="check the store path, or ingest a first profile",
        )
    path = Path(store_root) / current.file
    try:
        return duckdb.connect(str(path), read_only=True, config=READ_CONFIG), current.seq
    except duckdb.Error as error:
        raise StoreError(
            f"cannot open snapshot {current.seq}: {str(error).splitlines()[0]}",
            where=str(path),
            hint="ingest again to publish a new one",
        ) from error


def publish_if_stale(con: duckdb.DuckDBPyConnection, store_root: Path) -> int:
    """Publishes the live database unless the newest snapshot already holds its content; returns the newest `seq`.

    Raises:
        StoreError: The copy differs from the live database.
        OSError: The disk is full; CURRENT still names the previous snapshot.
    """
    current = read_current(store_root)
    fresh = current and current.revision == live.get_meta(con, "revision") and (store_root / current.file).exists()
    if not current or not fresh:
        current = _publish(con, store_root, _next_seq(con, store_root, current))
        durable.replace(store_root / "CURRENT", json.dumps(dataclasses.asdict(current), indent=1).encode())
        _retain(store_root / "snapshots", current.seq)
    link = store_root / "current.duckdb"
    if not link.is_symlink() or os.readlink(link) != current.file:  # also after a publish that died in between
        durable.replace_link(link, current.file)
    return current.seq


def _next_seq(con: duckdb.DuckDBPyConnection, store_root: Path, current: Current | None) -> int:
    # The log dies with a lost live database, old files are collected, CURRENT may be removed: together they remember.
    logged: int = _one(con, "select coalesce(max(seq), 0) from publish_log")
    on_disk = [_seq_of(path) for path in (store_root / "snapshots").glob("dflop-*.duckdb")]
    return 1 + max([current.seq if current else 0, logged, *on_disk])


def _publish(con: duckdb.DuckDBPyConnection, store_root: Path, seq: int) -> Current:
    final = store_root / "snapshots" / f"dflop-{seq:06d}.duckdb"
    durable.make_folder(final.parent)
    for leftover in final.parent.glob(f"{durable.TMP_PREFIX}*"):
        leftover.unlink()  # of an ingester that died: we hold its lock now
    published_at_s = time.time()
    with live.transaction(con):
        con.execute("insert into publish_log values (?, ?, ?)", [seq, published_at_s, duckdb.__version__])
    tmp = durable.tmp_path(final)
    _copy(con, tmp)
    durable.fsync_file(tmp)
    with open(tmp, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    os.chmod(tmp, 0o444)
    os.rename(tmp, final)
    durable.fsync_folder(final.parent)
    file_name = final.relative_to(store_root).as_posix()
    return Current(seq, file_name, sha256, live.get_meta(con, "revision"), duckdb.__version__, published_at_s)


def _copy(con: duckdb.DuckDBPyConnection, path: Path) -> None:
    source = _one(con, "select current_database()")
    target = str(path).replace("'", "''")
    con.execute(f"attach '{target}' as snapshot (storage_version '{STORAGE_VERSION}')")
    try:
        con.execute(f'copy from database "{source}" to snapshot')
    finally:
        con.execute("detach snapshot")
    con.execute(f"attach '{target}' as snapshot (read_only)")
    try:
        for (table,) in con.execute(
            "select table_name from duckdb_tables() where database_name = current_database()"
        ).fetchall():
            rows, copied = (_one(con, f'select count(*) from "{db}"."{table}"') for db in (source, "snapshot"))
            if rows != copied:
                raise StoreError(f"the copy of {table} has {copied} rows, the live table {rows}", where=str(path))
    finally:
        con.execute("detach snapshot")


def _one(con: duckdb.DuckDBPyConnection, sql: str) -> Any:
    row = con.execute(sql).fetchone()
    assert row is not None
    return row[0]


def _seq_of(path: Path) -> int:
    match = re.fullmatch(r"dflop-(\d+)\.duckdb", path.name)
    return int(match[1]) if match else 0


def _retain(folder: Path, newest: int) -> None:
    by_age = sorted(folder.glob("dflop-*.duckdb"), key=_seq_of)
    for path in by_age[:-KEEP]:
        if _seq_of(path) != newest and time.time() - path.stat().st_mtime > GRACE_S:
            path.unlink(missing_ok=True)
