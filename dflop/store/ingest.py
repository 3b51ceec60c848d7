"""Turns spool files into rows of the live database, each exactly once, and publishes a snapshot.

One pass: list the spool, leave out what the manifest knows, judge each file on its own (`check.py`), insert up to 500
files with their manifest rows in one transaction, read the manifest back, compute the roll-ups of the runs that
changed, publish. A file that fails a check moves to `<store>/quarantine` and leaves a row saying why. Killed anywhere,
the next pass continues: a file is in the manifest together with its rows, or not at all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa

from dflop import units
from dflop.errors import StoreError
from dflop.store import access, archive, file_check, live, quarantine, rollup, snapshot
from dflop.store.file_check import Bad, Denied, Good, Newer, SpoolFile, Touched
from dflop.store.lease import Lease
from dflop.store.spool import SpoolKey, list_files

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What one pass did."""

    num_files: int
    num_rows: int
    num_quarantined_files: int
    num_newer_files: int
    """Files left in the spool because only a newer dflop can read them."""
    num_unreadable: int
    """Files and folders left in the spool because this user may not read them."""
    snapshot_seq: int
    """Newest snapshot after the pass, also when this pass had nothing to publish."""
    elapsed_s: float


@dataclass(slots=True)
class Counts:
    """Running totals of a pass."""

    num_files: int = 0
    num_rows: int = 0
    num_bad: int = 0
    num_newer: int = 0
    num_unreadable: int = 0


@dataclass(frozen=True, slots=True)
class _Ingested:
    sha256: str
    num_bytes: int
    mtime_ns: int


def ingest(
    store_root: Path | str, progress: Progress | None = None, *, lock_timeout_s: float = live.LOCK_TIMEOUT_S
) -> IngestReport:
    """Ingests every new spool file and publishes a snapshot if anything changed; doing it again changes nothing.

    Args:
        store_root: Folder of the store; created when missing.
        progress: Called with a line per batch and per quarantined file.
        lock_timeout_s: How long to wait for another ingester.

    Raises:
        StoreError: Another ingester holds the store, a file cannot be read, the disk is full, or DuckDB failed. What
            was committed before stays; the next pass continues from there.
    """
    start_s, say = time.monotonic(), progress or _silent
    root = Path(store_root)
    try:
        with live.hold(root, lock_timeout_s=lock_timeout_s) as lease, live.connect(live.live_file(root)) as con:
            counts = ingest_pending(con, root, say, lease)
            seq = snapshot.publish_if_stale(con, root, lease, say)
    except (duckdb.Error, OSError) as error:
        raise access.error_of("ingest failed", error, root, hint="nothing is lost; ingest again") from error
    elapsed_s = time.monotonic() - start_s
    return IngestReport(
        counts.num_files, counts.num_rows, counts.num_bad, counts.num_newer, counts.num_unreadable, seq, elapsed_s
    )  # fmt: skip


def watch(
    store_root: Path | str, *, interval_s: float, progress: Progress | None = None, stop: threading.Event | None = None
) -> int:
    """Ingests again and again until `stop` is set; between passes anybody else may ingest. Returns how many passes ran.

    A pass that fails (store busy, disk full) is reported and tried again at the next turn.

    Args:
        store_root: Folder of the store.
        interval_s: Seconds from the end of one pass to the start of the next.
        progress: Called with a line per pass that did something, or failed.
        stop: Ends the loop after the pass in progress.
    """
    say, stop = progress or _silent, stop or threading.Event()
    num_passes = 0
    while not stop.is_set():
        try:
            done = ingest(store_root, say)
        except StoreError as error:
            say(f"{error}\n  next try in {units.seconds(interval_s)}")
        else:
            if done.num_files or done.num_quarantined_files:
                say(f"snapshot {done.snapshot_seq}: {units.count(done.num_rows)} rows of {done.num_files} files")
        num_passes += 1
        stop.wait(interval_s)
    return num_passes


def ingest_pending(
    con: duckdb.DuckDBPyConnection,
    root: Path,
    say: Progress,
    lease: Lease | None,
    *,
    only: set[SpoolKey] | None = None,
) -> Counts:
    """Brings a database up to the spool and the archive, and its roll-ups up to its rows; publishes nothing.

    Args:
        con: Live database, or one that is being rebuilt.
        root: Folder of the store.
        say: Called with a line per batch and per quarantined file.
        lease: Checked before every commit; None for a database nobody else can reach.
        only: Take these files and leave all others, bad ones included, alone; None takes every file.
    """
    counts = Counts()
    manifest = _manifest(con)
    _ingest_archive(con, root, say, lease, manifest, counts, only)
    pending, unreadable = _pending(root, manifest, only)
    known = {key.relative_path: found.sha256 for key, found in manifest.items()}
    for judged in file_check.judge_all(pending, known):
        good = [j for j in judged if isinstance(j, Good)]
        bad = [j for j in judged if isinstance(j, Bad)] if only is None else []
        touched = [j for j in judged if isinstance(j, Touched)]
        _commit_batch(con, root, good, bad, touched, lease)
        for b in bad:
            quarantine.move(root, b)
            say(f"quarantined {b.file.name}: {b.reason}")
        newer = [j for j in judged if isinstance(j, Newer)]
        for n in newer:
            say(f"left in the spool for a newer dflop: {n.file.name}: {n.reason}")
        unreadable += [j.error for j in judged if isinstance(j, Denied)]
        counts.num_files, counts.num_bad = counts.num_files + len(good), counts.num_bad + len(bad)
        counts.num_rows, counts.num_newer = counts.num_rows + _num_rows(good), counts.num_newer + len(newer)
        say(f"ingested {units.count(counts.num_rows)} rows of {counts.num_files} of {len(pending)} files")
    for error in unreadable:
        say(str(access.error_of("left in the spool", error, root)))
    counts.num_unreadable = len(unreadable)
    _refresh(con, root, lease)
    return counts


def _manifest(con: duckdb.DuckDBPyConnection) -> dict[SpoolKey, _Ingested]:
    rows = con.execute(
        "select kind, run_id, producer, seq, sha256, num_bytes, mtime_ns from ingest_manifest"
    ).fetchall()
    return {SpoolKey(*row[:4]): _Ingested(*row[4:]) for row in rows}


def _pending(
    root: Path, manifest: dict[SpoolKey, _Ingested], only: set[SpoolKey] | None
) -> tuple[list[SpoolFile], list[OSError]]:
    """Files the manifest does not know with this size and time, and errors of folders that this user may not read.

    Hashing every file in every pass would not scale.
    """
    pending: list[SpoolFile] = []
    unreadable: list[OSError] = []
    for name, path in list_files(root, on_error=unreadable.append):
        key = SpoolKey.parse(name)
        if only is not None and key not in only:
            continue
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue  # a compaction on another node took it to the archive; the next pass finds it there
        ingested = manifest.get(key) if key else None
        if not ingested or (ingested.num_bytes, ingested.mtime_ns) != (stat.st_size, stat.st_mtime_ns):
            pending.append(SpoolFile(name, path, stat.st_size, stat.st_mtime_ns))
    return pending, unreadable


def _ingest_archive(
    con: duckdb.DuckDBPyConnection,
    root: Path,
    say: Progress,
    lease: Lease | None,
    manifest: dict[SpoolKey, _Ingested],
    counts: Counts,
    only: set[SpoolKey] | None,
) -> None:
    """Compacted files this database has not met: all of them in a rebuild, another node's otherwise, none as a rule."""
    known = set(con.execute("select path, num_bytes, mtime_ns from archive_manifest").fetchall())
    for file in archive.list_archive(root):
        if (file.name, file.num_bytes, file.mtime_ns) in known:
            continue
        found = archive.read(file)
        wanted = [g for g in found.files if g.key not in manifest and (only is None or g.key in only)]
        with live.transaction(con, lease):
            _insert(con, wanted)
            if only is None:
                archive.note(con, found)
        _verify(con, wanted)
        for g in wanted:
            manifest[g.key] = _Ingested(g.sha256, g.file.num_bytes, g.file.mtime_ns)
        counts.num_files, counts.num_rows = counts.num_files + len(wanted), counts.num_rows + _num_rows(wanted)
        say(f"ingested {units.count(_num_rows(wanted))} rows of {len(wanted)} files out of archive/{file.name}")


def _commit_batch(
    con: duckdb.DuckDBPyConnection,
    root: Path,
    good: list[Good],
    bad: list[Bad],
    touched: list[Touched],
    lease: Lease | None,
) -> None:
    """Commits rows, manifest and quarantine entries of one batch together."""
    if not good and not bad and not touched:
        return
    entries = [quarantine.write_reason(root, b) for b in bad]
    with live.transaction(con, lease):
        _insert(con, good)
        quarantine.note(con, entries)
        _retime(con, touched)
        if good or bad:
            live.touch(con)
    _verify(con, good)


def _retime(con: duckdb.DuckDBPyConnection, touched: list[Touched]) -> None:
    """Notes the new time of known files, or every later pass would hash them again."""
    for t in touched:
        con.execute(
            "update ingest_manifest set mtime_ns = ? where kind = ? and run_id = ? and producer = ? and seq = ?",
            [t.file.mtime_ns, t.key.kind, t.key.run_id, t.key.producer, t.key.seq],
        )


def _insert(con: duckdb.DuckDBPyConnection, good: Sequence[Good]) -> None:
    if not good:
        return
    for kind in sorted({g.key.kind for g in good}):
        live.insert_table(con, kind, file_check.with_provenance(g for g in good if g.key.kind == kind))
    live.insert_table(con, "ingest_manifest", _manifest_rows(good))
    run_ids = {g.key.run_id for g in good}
    # Roll-ups of a run may look at its comparison steps, whose run id has the run's as its first part.
    rollup.mark(con, run_ids | {run_id.partition("/")[0] for run_id in run_ids})
    live.touch(con)


def _manifest_rows(good: Sequence[Good]) -> pa.Table:
    now_s = time.time()
    return pa.table(
        {
            "kind": [g.key.kind for g in good],
            "run_id": [g.key.run_id for g in good],
            "producer": [g.key.producer for g in good],
            "seq": [g.key.seq for g in good],
            "sha256": [g.sha256 for g in good],
            "num_bytes": [g.file.num_bytes for g in good],
            "mtime_ns": [g.file.mtime_ns for g in good],
            "num_rows": [g.table.num_rows for g in good],
            "ingested_at_s": [now_s] * len(good),
        }
    )


def _verify(con: duckdb.DuckDBPyConnection, good: Sequence[Good]) -> None:
    # COMMIT can report success and commit nothing: believe only what can be read back.
    if not good:
        return
    with live.registered(con, _manifest_rows(good)) as incoming:
        (found,) = con.execute(
            f"select count(*) from ingest_manifest semi join {incoming} using (kind, run_id, producer, seq, sha256)"
        ).fetchall()[0]
    if found != len(good):
        raise StoreError(f"a commit reported success but left {found} of {len(good)} manifest rows")


def _refresh(con: duckdb.DuckDBPyConnection, root: Path, lease: Lease | None) -> None:
    with live.transaction(con, lease):
        entries = quarantine.unknown(con, root)  # those of another node, or of a database that was lost
        quarantine.note(con, entries)
        if rollup.refresh(con) or entries:
            live.touch(con)


def _num_rows(good: Sequence[Good]) -> int:
    return sum(g.table.num_rows for g in good)


def _silent(_line: str) -> None:
    pass
