"""Turns spool files into rows of the live database, each exactly once, and publishes a snapshot.

One pass: list the spool, leave out what the manifest knows, judge each file on its own (`file_check.py`), insert up to
500 files with their manifest rows in one transaction, read its mark back, compute the roll-ups of the runs that
changed, publish. A file that fails a check moves to `<store>/quarantine` and leaves a row saying why. Killed anywhere,
the next pass continues: a file is in the manifest together with its rows, or not at all.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import pyarrow as pa

from dflop import units
from dflop.errors import StoreError
from dflop.records import to_dict
from dflop.store import access, archive, file_check, health, live, quarantine, rollup, schema, settings, snapshot
from dflop.store.file_check import Bad, Good, StoredFile, Touched, Waiting
from dflop.store.lease import Lease
from dflop.store.live import Progress
from dflop.store.spool import SpoolKey, list_files


@dataclass(slots=True)
class IngestReport:
    """What one pass did."""

    num_files: int = 0
    num_rows: int = 0
    num_quarantined_files: int = 0
    num_newer_files: int = 0
    """Files left in the spool because only a newer dflop can read them."""
    num_unreadable: int = 0
    """Files and folders left in the spool because this user may not read them."""
    snapshot_seq: int = 0
    """Newest snapshot after the pass, also when this pass had nothing to publish."""
    elapsed_s: float = 0.0
    problems: tuple[str, ...] = ()
    """What `verify` found, a line each."""


@dataclass(frozen=True, slots=True)
class Ingested:
    """What the manifest says of a file."""

    sha256: str
    num_bytes: int
    mtime_ns: int


def ingest(
    store_root: Path | str, say: Progress = live.silent, *, lock_timeout_s: float = live.LOCK_TIMEOUT_S,
    is_urgent: bool = True,
) -> IngestReport:  # fmt: skip
    """Ingests every new spool file and publishes a snapshot if anything changed; doing it again changes nothing.

    Waits `lock_timeout_s` for another ingester; `say` hears of every batch and every quarantined file. What is not
    urgent is published when a snapshot is due, by this pass or a later one: whoever repeats passes wants that.

    Raises:
        StoreError: Another ingester holds the store, a file cannot be read, the disk is full, or DuckDB failed. What
            was committed before stays; the next pass continues from there.
    """
    start_s, root, hint = time.monotonic(), Path(store_root), "nothing is lost; ingest again"
    with live.open_live(root, "ingest failed", hint=hint, lock_timeout_s=lock_timeout_s) as (con, lease):
        report = ingest_pending(con, root, say, lease)
        report.snapshot_seq = snapshot.publish_if_stale(con, root, lease, say, is_urgent=is_urgent)
    report.elapsed_s = time.monotonic() - start_s
    return report


def watch(store_root: Path | str, *, interval_s: float, stop: threading.Event, say: Progress = live.silent) -> int:
    """Ingests again and again until `stop` is set; between passes anybody else may ingest. Returns how many passes ran.

    A pass that fails (store busy, disk full) is reported and tried again `interval_s` after its end, as others are.
    """
    num_passes = 0
    while not stop.is_set():
        try:
            done = ingest(store_root, say)
        except StoreError as error:
            say(f"{error}\n  next attempt in {units.seconds(interval_s)}")
        else:
            if done.num_files or done.num_quarantined_files:
                say(f"snapshot {done.snapshot_seq}: {units.count(done.num_rows)} rows of {done.num_files} files")
        num_passes += 1
        stop.wait(interval_s)
    return num_passes


def freshen(store_root: Path | str, run_id: str, say: Progress = live.silent) -> int:
    """Ingests if files of a run wait and nobody else is at it; returns and says how many of its files wait afterwards.

    Never in the way of others, and never slow: a busy store stays with whoever is at it, and a live database that this
    node would have to build first (`dflop store init --live`) is left to the nodes that have it.
    """
    root = Path(store_root)
    num_waiting = _num_waiting(root, run_id)
    if num_waiting and (live.live_file(root).is_file() or not settings.read_settings(root).live):
        with contextlib.suppress(StoreError):
            ingest(root, lock_timeout_s=0.0)
        num_waiting = _num_waiting(root, run_id)
    if num_waiting:
        say(f"{num_waiting} files of the run are not ingested yet: dflop store ingest --store {root}")
    return num_waiting


def _num_waiting(root: Path, run_id: str) -> int:
    try:
        return len(health.waiting_files(root, run_id))
    except StoreError:  # the newest snapshot does not open: an ingest publishes another one
        return len(health.spooled(root, run_id))


def ingest_pending(
    con: duckdb.DuckDBPyConnection,
    root: Path,
    say: Progress,
    lease: Lease | None,
    *,
    only: set[SpoolKey] | None = None,
) -> IngestReport:
    """Brings a database up to the spool and the archive, and its roll-ups up to its rows; publishes nothing.

    The lease is checked before every commit; there is none for a database that nobody else can reach. With `only`
    these files are taken and all others left alone, bad ones included.
    """
    this = _Pass(con, root, say, lease, only, manifest(con))
    this.take_archive()
    this.take_spool()
    with live.transaction(con, lease):
        num_noted = quarantine.note_new(con, root)
        if rollup.refresh(con) or num_noted:
            live.touch(con)
    return this.report


def manifest(con: duckdb.DuckDBPyConnection) -> dict[SpoolKey, Ingested]:
    """The files whose rows are in the database."""
    sql = "select kind, run_id, producer, seq, sha256, num_bytes, mtime_ns from ingest_manifest"
    return {SpoolKey(*row[:4]): Ingested(*row[4:]) for row in con.execute(sql).fetchall()}


@dataclass(slots=True)
class _Pass:
    con: duckdb.DuckDBPyConnection
    root: Path
    say: Progress
    lease: Lease | None
    only: set[SpoolKey] | None
    known: dict[SpoolKey, Ingested]
    report: IngestReport = field(default_factory=IngestReport)

    def take_archive(self) -> None:
        """Compacted files this database has not met: all of them in a rebuild, another node's otherwise, else none."""
        met = set(self.con.execute("select path, num_bytes, mtime_ns from archive_manifest").fetchall())
        for file in archive.list_archive(self.root):
            if (file.name, file.num_bytes, file.mtime_ns) in met:
                continue
            sha256, found = archive.read(file)
            wanted = [g for g in found if g.key not in self.known and (self.only is None or g.key in self.only)]
            self._commit(wanted)
            if self.only is None:
                with live.transaction(self.con, self.lease):
                    archive.note(self.con, file, sha256, found)
            for g in wanted:
                self.known[g.key] = Ingested(g.sha256, g.file.num_bytes, g.file.mtime_ns)
            num_rows = units.count(sum(g.table.num_rows for g in wanted))
            self.say(f"ingested {num_rows} rows of {len(wanted)} files out of archive/{file.name}")

    def take_spool(self) -> None:
        """Judges and commits, batch by batch, the files that are new; says which ones stay where they are, and why."""
        report, (pending, unreadable) = self.report, self._pending()
        hashes = {key.relative_path: found.sha256 for key, found in self.known.items()}
        for judged in file_check.judge_all(pending, hashes):
            self._commit([j for j in judged if isinstance(j, Good)], [j for j in judged if isinstance(j, Touched)])
            for j in judged:
                if isinstance(j, Bad) and self.only is None:
                    quarantine.move(self.root, j)
                    self.say(f"quarantined {j.file.name}: {j.reason}")
                    report.num_quarantined_files += 1
                elif isinstance(j, Waiting) and isinstance(j.error, OSError):
                    unreadable.append(j.error)
                elif isinstance(j, Waiting):
                    self.say(f"left in the spool for a newer dflop: {j.file.name}: {j.error}")
                    report.num_newer_files += 1
            self.say(f"ingested {units.count(report.num_rows)} rows of {report.num_files} of {len(pending)} files")
        for error in unreadable:
            self.say(str(access.error_of("left in the spool", error, self.root)))
        report.num_unreadable = len(unreadable)

    def _pending(self) -> tuple[list[StoredFile], list[OSError]]:
        """Files not known with this size and time (to hash all would not scale), and errors of unreadable folders."""
        pending: list[StoredFile] = []
        unreadable: list[OSError] = []
        for name, path in list_files(self.root, on_error=unreadable.append):
            key = SpoolKey.parse(name)
            if self.only is not None and key not in self.only:
                continue
            try:
                file = StoredFile.of(self.root / "spool", path)
            except FileNotFoundError:
                continue  # a compaction on another node took it to the archive; the next pass finds it there
            noted = self.known.get(key) if key else None
            if not noted or (noted.num_bytes, noted.mtime_ns) != (file.num_bytes, file.mtime_ns):
                pending.append(file)
        return pending, unreadable

    def _commit(self, good: Sequence[Good], touched: Sequence[Touched] = ()) -> None:
        """Commits rows and manifest together, and believes only what can be read back."""
        con, revision = self.con, ""
        with live.transaction(con, self.lease):
            if good:
                _insert(con, good)
                revision = live.touch(con)
            for t in touched:  # or every later pass would hash it again
                con.execute(
                    "update ingest_manifest set mtime_ns = ? where (kind, run_id, producer, seq) = (?, ?, ?, ?)",
                    [t.file.mtime_ns, t.key.kind, t.key.run_id, t.key.producer, t.key.seq],
                )
        if good and live.get_meta(con, "revision") != revision:
            raise StoreError("a commit reported success but stored nothing")
        self.report.num_files += len(good)
        self.report.num_rows += sum(g.table.num_rows for g in good)


def _insert(con: duckdb.DuckDBPyConnection, good: Sequence[Good]) -> None:
    for kind in sorted({g.key.kind for g in good} - schema.RETIRED):
        live.insert_table(con, kind, file_check.with_provenance(g for g in good if g.key.kind == kind))
    now_s = time.time()
    rows = [
        {
            **to_dict(g.key), "sha256": g.sha256, "num_bytes": g.file.num_bytes, "mtime_ns": g.file.mtime_ns,
            "num_rows": g.table.num_rows, "ingested_at_s": now_s,
        }
        for g in good
    ]  # fmt: skip
    live.insert_table(con, "ingest_manifest", pa.Table.from_pylist(rows))
    run_ids = {g.key.run_id for g in good}
    # Roll-ups of a run may look at its comparison steps, whose run id has the run's as its first part.
    dirty = run_ids | {run_id.partition("/")[0] for run_id in run_ids}
    con.execute("insert or ignore into dirty_run select unnest(?::varchar[])", [sorted(dirty)])
