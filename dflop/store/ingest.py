"""Turns spool files into rows of the live database, each exactly once, and publishes a snapshot.

One pass: list the spool, leave out what the manifest knows, judge each file on its own (`file_check.py`), insert up to
500 files with their manifest rows in one transaction, read the manifest back, compute the roll-ups of the runs that
changed, publish. A file that fails a check moves to `<store>/quarantine` and leaves a row saying why. Killed anywhere,
the next pass continues: a file is in the manifest together with its rows, or not at all.
"""

from __future__ import annotations

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
from dflop.store import access, archive, file_check, live, quarantine, rollup, snapshot
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


@dataclass(frozen=True, slots=True)
class Ingested:
    """What the manifest says of a file."""

    sha256: str
    num_bytes: int
    mtime_ns: int


def ingest(
    store_root: Path | str, say: Progress = live.silent, *, lock_timeout_s: float = live.LOCK_TIMEOUT_S
) -> IngestReport:
    """Ingests every new spool file and publishes a snapshot if anything changed; doing it again changes nothing.

    Args:
        store_root: Folder of the store; created when missing.
        say: Called with a line per batch and per quarantined file.
        lock_timeout_s: How long to wait for another ingester.

    Raises:
        StoreError: Another ingester holds the store, a file cannot be read, the disk is full, or DuckDB failed. What
            was committed before stays; the next pass continues from there.
    """
    start_s, root = time.monotonic(), Path(store_root)
    hint = "nothing is lost; ingest again"
    with live.open_live(root, "ingest failed", hint=hint, lock_timeout_s=lock_timeout_s) as (con, lease):
        report = ingest_pending(con, root, say, lease)
        report.snapshot_seq = snapshot.publish_if_stale(con, root, lease, say)
    report.elapsed_s = time.monotonic() - start_s
    return report


def watch(store_root: Path | str, *, interval_s: float, stop: threading.Event, say: Progress = live.silent) -> int:
    """Ingests again and again until `stop` is set; between passes anybody else may ingest. Returns how many passes ran.

    A pass that fails (store busy, disk full) is reported and tried again at the next turn.

    Args:
        store_root: Folder of the store.
        interval_s: Seconds from the end of one pass to the start of the next.
        stop: Ends the loop after the pass in progress.
        say: Called with a line per pass that did something, or failed.
    """
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
) -> IngestReport:
    """Brings a database up to the spool and the archive, and its roll-ups up to its rows; publishes nothing.

    Args:
        con: Live database, or one that is being rebuilt.
        root: Folder of the store.
        say: Called with a line per batch and per quarantined file.
        lease: Checked before every commit; None for a database nobody else can reach.
        only: Take these files and leave all others, bad ones included, alone; None takes every file.

    Raises:
        StoreError: The lease is lost, a compacted file is damaged, or a commit left nothing.
        duckdb.Error, OSError: As they come.
    """
    this = _Pass(con, root, say, lease, only, manifest(con))
    this.take_archive()
    this.take_spool()
    with live.transaction(con, lease):
        entries = quarantine.unknown(con, root)  # those of another node, or of a database that was lost
        quarantine.note(con, entries)
        if rollup.refresh(con) or entries:
            live.touch(con)
    return this.report


def manifest(con: duckdb.DuckDBPyConnection) -> dict[SpoolKey, Ingested]:
    """The files whose rows are in the database."""
    rows = con.execute(
        "select kind, run_id, producer, seq, sha256, num_bytes, mtime_ns from ingest_manifest"
    ).fetchall()
    return {SpoolKey(*row[:4]): Ingested(*row[4:]) for row in rows}


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
            found = archive.read(file)
            wanted = [g for g in found.files if g.key not in self.known and (self.only is None or g.key in self.only)]
            self._commit(wanted, compacted=found)
            for g in wanted:
                self.known[g.key] = Ingested(g.sha256, g.file.num_bytes, g.file.mtime_ns)
            num_rows = units.count(sum(g.table.num_rows for g in wanted))
            self.say(f"ingested {num_rows} rows of {len(wanted)} files out of archive/{file.name}")

    def take_spool(self) -> None:
        """Judges and commits, batch by batch, the files that are new; says which ones stay where they are, and why."""
        report, (pending, unreadable) = self.report, self._pending()
        hashes = {key.relative_path: found.sha256 for key, found in self.known.items()}
        for judged in file_check.judge_all(pending, hashes):
            bad = [j for j in judged if isinstance(j, Bad)] if self.only is None else []
            touched = [j for j in judged if isinstance(j, Touched)]
            self._commit([j for j in judged if isinstance(j, Good)], bad, touched)
            for b in bad:
                quarantine.move(self.root, b)
                self.say(f"quarantined {b.file.name}: {b.reason}")
            for w in (j for j in judged if isinstance(j, Waiting)):
                if isinstance(w.error, OSError):
                    unreadable.append(w.error)
                    continue
                self.say(f"left in the spool for a newer dflop: {w.file.name}: {w.error}")
                report.num_newer_files += 1
            self.say(f"ingested {units.count(report.num_rows)} rows of {report.num_files} of {len(pending)} files")
        for error in unreadable:
            self.say(str(access.error_of("left in the spool", error, self.root)))
        report.num_unreadable = len(unreadable)

    def _pending(self) -> tuple[list[StoredFile], list[OSError]]:
        """Files not known with this size and time, and errors of folders that this user may not read.

        Hashing every file in every pass would not scale.
        """
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

    def _commit(
        self,
        good: Sequence[Good],
        bad: Sequence[Bad] = (),
        touched: Sequence[Touched] = (),
        compacted: archive.Archive | None = None,
    ) -> None:
        """Commits rows, manifest and quarantine entries together, and believes only what can be read back."""
        con, entries = self.con, [quarantine.write_reason(self.root, b) for b in bad]
        with live.transaction(con, self.lease):
            _insert(con, good)
            quarantine.note(con, entries)
            for t in touched:  # or every later pass would hash it again
                con.execute(
                    "update ingest_manifest set mtime_ns = ? where (kind, run_id, producer, seq) = (?, ?, ?, ?)",
                    [t.file.mtime_ns, t.key.kind, t.key.run_id, t.key.producer, t.key.seq],
                )
            if compacted and self.only is None:
                archive.note(con, compacted)
            if good or bad:
                live.touch(con)
        if good:  # COMMIT can report success and commit nothing
            _verify(con, good)
        self.report.num_files += len(good)
        self.report.num_rows += sum(g.table.num_rows for g in good)
        self.report.num_quarantined_files += len(bad)


def _insert(con: duckdb.DuckDBPyConnection, good: Sequence[Good]) -> None:
    if not good:
        return
    for kind in sorted({g.key.kind for g in good}):
        live.insert_table(con, kind, file_check.with_provenance(g for g in good if g.key.kind == kind))
    live.insert_table(con, "ingest_manifest", _manifest_rows(good))
    run_ids = {g.key.run_id for g in good}
    # Roll-ups of a run may look at its comparison steps, whose run id has the run's as its first part.
    rollup.mark(con, run_ids | {run_id.partition("/")[0] for run_id in run_ids})


def _manifest_rows(good: Sequence[Good]) -> pa.Table:
    now_s = time.time()
    rows = [
        {
            **to_dict(g.key), "sha256": g.sha256, "num_bytes": g.file.num_bytes, "mtime_ns": g.file.mtime_ns,
            "num_rows": g.table.num_rows, "ingested_at_s": now_s,
        }
        for g in good
    ]  # fmt: skip
    return pa.Table.from_pylist(rows)


def _verify(con: duckdb.DuckDBPyConnection, good: Sequence[Good]) -> None:
    with live.registered(con, _manifest_rows(good)) as incoming:
        (found,) = con.execute(
            f"select count(*) from ingest_manifest semi join {incoming} using (kind, run_id, producer, seq, sha256)"
        ).fetchall()[0]
    if found != len(good):
        raise StoreError(f"a commit reported success but left {found} of {len(good)} manifest rows")
