"""Makes a database again from the spool, the archive and the publish log: the live one, or any past snapshot.

What cannot come back is when files were first ingested; everything else can, the numbers of the snapshots and the
reasons of quarantined files included.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflop import files
from dflop.errors import ConfigError, StoreError
from dflop.store import durable, live, publishes, snapshot
from dflop.store.ingest import IngestReport, ingest_pending
from dflop.store.live import Progress
from dflop.store.spool import SpoolKey


def rebuild(store_root: Path | str, say: Progress = live.silent) -> IngestReport:
    """Replaces the live database by one made from the spool and publishes it.

    The old file stays in place until the new one is complete. Snapshots are left alone: readers notice nothing.

    Raises:
        StoreError: Another ingester holds the store, a compacted file is damaged, or the disk is full.
    """
    root = Path(store_root)
    with live.explained("rebuild failed", root, "the spool is unchanged; try again"), live.hold(root) as lease:
        path = live.live_file(root)
        with scratch(path.parent) as new:
            report = fill(new, root, say)
            lease.check()
            if report.num_unreadable:
                raise StoreError(
                    f"a rebuild would leave out {report.num_unreadable} files or folders that cannot be read",
                    where=str(root / "spool"),
                    hint="make them readable, as is said of each above, or let their owner rebuild",
                )
            _remove(path)  # with its log, which would be replayed into the new file
            os.replace(new, path)
            files.fsync(path.parent)
        with live.connect(path) as con:
            report.snapshot_seq = snapshot.publish_if_stale(con, root, lease, say)
    return report


def rebuild_snapshot(
    store_root: Path | str, snapshot_seq: int, output: Path | str, say: Progress = live.silent
) -> IngestReport:
    """Writes the rows that snapshot `snapshot_seq` held into a new read-only database file.

    Tables and views are those of today's dflop. The store itself is only read.

    Args:
        store_root: Folder of the store.
        snapshot_seq: Number of a snapshot, as plans and runs record it.
        output: File to write; must not exist.
        say: Called with a line per batch.

    Raises:
        ConfigError: `output` exists, or the publish log does not reach back to this snapshot.
        StoreError: A file the snapshot held is in neither the spool nor the archive.
    """
    root, target = Path(store_root), Path(output)
    if target.exists():
        raise ConfigError(f"{target} exists", hint="give the name of a new file")
    wanted = _files_of(root, snapshot_seq)
    with live.explained(f"cannot make snapshot {snapshot_seq} again", target):
        durable.make_folder(target.parent)
        with scratch(target.parent) as path:
            report = fill(path, root, say, only=wanted)
            if report.num_files != len(wanted):
                raise StoreError(
                    f"snapshot {snapshot_seq} held {len(wanted)} files, {report.num_files} are left in the store",
                    where=str(root),
                    hint="restore the missing spool or archive files from a backup",
                )
            with live.connect(path) as con, files.replacing(target, is_durable=True) as final:
                snapshot.copy_database(con, final)
                os.chmod(final, 0o444)
    report.snapshot_seq = snapshot_seq
    return report


def fill(path: Path, root: Path, say: Progress, *, only: set[SpoolKey] | None = None) -> IngestReport:
    """Fills a new database with everything the store has on disk, or only with the files of these keys."""
    with live.connect(path) as con:
        report = ingest_pending(con, root, say, None, only=only)
        with live.transaction(con):
            columns = "(seq, published_at_s, duckdb_version, revision)"
            same = " and ".join(f"ingest_manifest.{name} = logged.{name}" for name in SpoolKey.__slots__)
            for p in publishes.read(root):
                values = [p.seq, p.published_at_s, p.duckdb, p.revision]
                con.execute(f"insert or ignore into publish_log {columns} values (?, ?, ?, ?)", values)
                with live.registered(con, publishes.table_of(p.keys)) as rows:
                    sql = f"update ingest_manifest set snapshot_seq = ? from {rows} as logged where {same}"
                    con.execute(sql, [p.seq])
            live.touch(con)
        return report


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A name for a database that is gone, with its log, when the block ends; unless it was renamed."""
    durable.make_folder(folder)
    path = files.tmp_path(folder / "rebuild.duckdb")
    try:
        yield path
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    for suffix in (".wal", ""):
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
