"""Makes a database again from the spool, the archive and the publish log: the live one, or any past snapshot.

What cannot come back is when files were first ingested; everything else can, the numbers of the snapshots and the
reasons of quarantined files included.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa

from dflop import files
from dflop.errors import ConfigError, StoreError
from dflop.store import access, durable, live, publishes, snapshot
from dflop.store.ingest import Counts, Progress, ingest_pending
from dflop.store.spool import SpoolKey


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What was rebuilt."""

    num_files: int
    num_rows: int
    snapshot_seq: int
    """Snapshot that was published, or made again."""
    elapsed_s: float


def rebuild(store_root: Path | str, progress: Progress | None = None) -> RebuildReport:
    """Replaces the live database by one made from the spool and publishes it.

    The old file stays in place until the new one is complete. Snapshots are left alone: readers notice nothing.

    Raises:
        StoreError: Another ingester holds the store, a compacted file is damaged, or the disk is full.
    """
    start_s, root = time.monotonic(), Path(store_root)
    say = progress or _silent
    try:
        with live.hold(root) as lease:
            path = live.live_file(root)
            with scratch(path.parent) as new:
                counts = fill(new, root, say)
                lease.check()
                if counts.num_unreadable:
                    raise StoreError(
                        f"a rebuild would leave out {counts.num_unreadable} files or folders that cannot be read",
                        where=str(root / "spool"),
                        hint="make them readable, as is said of each above, or let their owner rebuild",
                    )
                # The old log would be replayed into the new file.
                for suffix in (".wal", ""):
                    path.with_name(path.name + suffix).unlink(missing_ok=True)
                os.replace(new, path)
                durable.fsync_folder(path.parent)
            with live.connect(path) as con:
                seq = snapshot.publish_if_stale(con, root, lease, say)
    except (duckdb.Error, OSError) as error:
        raise access.error_of("rebuild failed", error, root, hint="the spool is unchanged; try again") from error
    return RebuildReport(counts.num_files, counts.num_rows, seq, time.monotonic() - start_s)


def rebuild_snapshot(
    store_root: Path | str, snapshot_seq: int, output: Path | str, progress: Progress | None = None
) -> RebuildReport:
    """Writes the rows that snapshot `snapshot_seq` held into a new read-only database file.

    Tables and views are those of today's dflop. The store itself is only read.

    Args:
        store_root: Folder of the store.
        snapshot_seq: Number of a snapshot, as plans and runs record it.
        output: File to write; must not exist.
        progress: Called with a line per batch.

    Raises:
        ConfigError: `output` exists, or the publish log does not reach back to this snapshot.
        StoreError: A file the snapshot held is in neither the spool nor the archive.
    """
    start_s, root, target = time.monotonic(), Path(store_root), Path(output)
    if target.exists():
        raise ConfigError(f"{target} exists", hint="give the name of a new file")
    wanted = _files_of(root, snapshot_seq)
    say = progress or _silent
    try:
        durable.make_folder(target.parent)
        with scratch(target.parent) as path:
            counts = fill(path, root, say, only=wanted)
            if counts.num_files != len(wanted):
                raise StoreError(
                    f"snapshot {snapshot_seq} held {len(wanted)} files, {counts.num_files} are left in the store",
                    where=str(root),
                    hint="restore the missing spool or archive files from a backup",
                )
            with live.connect(path) as con:
                final = files.tmp_path(target)
                snapshot.copy_database(con, final)
            durable.fsync_file(final)
            os.chmod(final, 0o444)
            os.rename(final, target)
    except (duckdb.Error, OSError) as error:
        raise access.error_of(f"cannot make snapshot {snapshot_seq} again", error, target) from error
    return RebuildReport(counts.num_files, counts.num_rows, snapshot_seq, time.monotonic() - start_s)


def fill(path: Path, root: Path, say: Progress, *, only: set[SpoolKey] | None = None) -> Counts:
    """Fills a new database with everything the store has on disk, or only with the files of these keys."""
    with live.connect(path) as con:
        counts = ingest_pending(con, root, say, None, only=only)
        with live.transaction(con):
            for publish in publishes.read(root):
                _note_publish(con, publish)
            live.touch(con)
        return counts


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A name for a database that is gone, with its log, when the block ends; unless it was renamed."""
    durable.make_folder(folder)
    path = files.tmp_path(folder / "rebuild.duckdb")
    try:
        yield path
    finally:
        for suffix in ("", ".wal"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)


def _files_of(root: Path, snapshot_seq: int) -> set[SpoolKey]:
    logged = {p.seq: p.keys for p in publishes.read(root)}
    if snapshot_seq not in logged:
        known = f"{min(logged)} to {max(logged)}" if logged else "none"
        raise ConfigError(
            f"snapshot {snapshot_seq} is not in the publish log, which knows {known}",
            where=str(root / "publishes"),
            hint="snapshots of dflop 0.1 were not logged: only their files, where they still exist, have their content",
        )
    return {key for seq, keys in logged.items() if seq <= snapshot_seq for key in keys}


def _note_publish(con: duckdb.DuckDBPyConnection, publish: publishes.Publish) -> None:
    con.execute(
        "insert or ignore into publish_log (seq, published_at_s, duckdb_version, revision) values (?, ?, ?, ?)",
        [publish.seq, publish.published_at_s, publish.duckdb, publish.revision],
    )
    columns = {name: [getattr(key, name) for key in publish.keys] for name in SpoolKey.__slots__}
    if not publish.keys:
        return
    with live.registered(con, pa.table(columns)) as incoming:
        con.execute(
            f"update ingest_manifest set snapshot_seq = ? from {incoming} as logged where "
            + " and ".join(f"ingest_manifest.{name} = logged.{name}" for name in columns),
            [publish.seq],
        )


def _silent(_line: str) -> None:
    pass
