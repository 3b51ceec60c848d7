"""Makes a database again from the spool, the archive and the publish log: the live one, or any past snapshot.

What cannot come back is when files were first ingested; everything else can, the numbers of the snapshots and the
reasons of quarantined files included. So `verify` can prove that the database, the newest snapshot and the files say
the same, by three comparisons: every file of the manifest is on disk with the recorded hash; the snapshot is, byte for
byte, what was published; and a database made again holds the same rows in every table as the live one, compared as
multisets per spool file, so that a difference names the file. Roll-ups may differ in the last digits.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import duckdb

from dflop import files
from dflop.errors import ConfigError, StoreError
from dflop.store import archive, durable, live, publishes, schema, snapshot
from dflop.store.ingest import Ingested, IngestReport, ingest_pending, manifest
from dflop.store.live import Progress
from dflop.store.spool import SpoolKey, list_files

MAX_EXAMPLES = 5
ROLLUP_TOLERANCE = 1e-9
"""Relative and absolute: a parallel sum adds its terms in whichever order threads finish."""


def rebuild(store_root: Path | str, say: Progress = live.silent) -> IngestReport:
    """Replaces the live database, once the new one is complete, by one made from the spool, and publishes it.

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
                what = f"a rebuild would skip {report.num_unreadable} files or folders that cannot be read"
                hint = "make them readable, as described above, or have their owner run the rebuild"
                raise StoreError(what, where=str(root / "spool"), hint=hint)
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

    Raises:
        ConfigError: `output` exists, or the publish log does not reach back to this snapshot.
        StoreError: A file the snapshot held is in neither the spool nor the archive.
    """
    root, target = Path(store_root), Path(output)
    if target.exists():
        raise ConfigError(f"{target} exists", hint="name a new file")
    wanted = _files_of(root, snapshot_seq)
    with live.explained(f"cannot rebuild snapshot {snapshot_seq}", target):
        durable.make_folder(target.parent)
        with scratch(target.parent) as path:
            report = fill(path, root, say, only=wanted)
            if report.num_files != len(wanted):
                what = f"snapshot {snapshot_seq} held {len(wanted)} files, the store still has {report.num_files}"
                hint = "restore the missing spool or archive files from a backup"
                raise StoreError(what, where=str(root), hint=hint)
            with live.connect(path) as con, files.replacing(target, is_durable=True) as final:
                snapshot.copy_database(con, final)
                os.chmod(final, 0o444)
    report.snapshot_seq = snapshot_seq
    return report


def verify(store_root: Path | str, say: Progress = live.silent) -> IngestReport:
    """Compares database, newest snapshot and files after an ingest; takes the time and disk space of a rebuild."""
    start_s, root = time.monotonic(), Path(store_root)
    with live.open_live(root, "cannot verify") as (con, lease):
        problems: list[str] = []
        ingest_pending(con, root, say, lease)
        snapshot.publish_if_stale(con, root, lease, problems.append)
        recorded = manifest(con)
        problems += [*_check_files(recorded, root), *_check_snapshot(root)]
        with scratch(live.live_file(root).parent) as path:
            say("rebuilding the database from the files")
            # Only what is in the manifest: files that arrive meanwhile are for the next pass.
            report = fill(path, root, live.silent, only=set(recorded))
            problems += _compare(con, path)
    report.problems, report.elapsed_s = tuple(problems), time.monotonic() - start_s
    return report


def fill(path: Path, root: Path, say: Progress, *, only: set[SpoolKey] | None = None) -> IngestReport:
    """Fills a new database with everything the store has on disk, or only with the files of these keys."""
    with live.connect(path) as con:
        report = ingest_pending(con, root, say, None, only=only)
        with live.transaction(con):
            same = " and ".join(f"ingest_manifest.{name} = logged.{name}" for name in SpoolKey.__slots__)
            for p in publishes.read(root):
                publishes.note(con, p)
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
        what = f"snapshot {snapshot_seq} is not in the publish log, which knows {known}"
        hint = "snapshots of dflop 0.1 were not logged: only their files, if they still exist, have their content"
        raise ConfigError(what, where=str(root / publishes.FOLDER), hint=hint)
    return {key for seq, keys in logged.items() if seq <= snapshot_seq for key in keys}


def _check_files(recorded: Mapping[SpoolKey, Ingested], root: Path) -> list[str]:
    found = {g.key: g.sha256 for file in archive.list_archive(root) for g in archive.read(file)[1]}
    for name, path in list_files(root):
        if (key := SpoolKey.parse(name)) and key in recorded:
            found[key] = hashlib.sha256(path.read_bytes()).hexdigest()
    missing = sorted(key.relative_path for key in recorded if key not in found)
    differing = sorted(
        key.relative_path for key, sha256 in found.items() if key in recorded and sha256 != recorded[key].sha256
    )
    return [
        *_examples("is in the database, but neither in the spool nor in the archive", missing),
        *_examples("is not the file that was ingested: another hash", differing),
    ]


def _check_snapshot(root: Path) -> list[str]:
    current = snapshot.read_current(root)
    if current is None:
        return ["there is no snapshot"]
    with open(root / current.file, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    what = f"snapshot {current.seq} ({current.file}) is not what was published: sha256 {sha256}, not {current.sha256}"
    return [] if sha256 == current.sha256 else [what]


def _compare(con: duckdb.DuckDBPyConnection, rebuilt: Path) -> list[str]:
    """Differences between the connected live database and one made from the files."""
    problems = []
    with live.attached(con, rebuilt, "rebuilt"):
        for kind in schema.KINDS:
            differing = sorted(SpoolKey(kind, *row).relative_path for row in con.execute(_difference(kind)).fetchall())
            problems += _examples(f"has other rows in table {kind} than a rebuild", differing)
        rollups = "select table_name from duckdb_tables() where suffix(table_name, '_rollup')"
        for (table,) in con.execute(f"{rollups} and database_name = current_database()").fetchall():
            problems += _examples(f"has another {table} than a rebuild", _differing_runs(con, table))
    return problems


def _differing_runs(con: duckdb.DuckDBPyConnection, table: str) -> list[str]:
    same, near = ["a._rows = b._rows"], []
    for name, kind, *_ in con.execute(f'describe "{table}"').fetchall():
        a, b = f'a."{name}"', f'b."{name}"'
        same.append(f"{a} is not distinct from {b}")
        if kind == "DOUBLE":
            close = f"abs({a} - {b}) <= $eps * greatest(1, abs({a}), abs({b})) and isfinite({a} - {b})"
            near.append(f"({same.pop()} or coalesce({close}, false))")
    side = f'(select *, count(*) over (partition by run_id) as _rows from {{}}"{table}") as {{}}'
    live_side, new_side = side.format("", "a"), side.format("rebuilt.", "b")
    on = " and ".join([*same, *near])
    only_live = f"select a.run_id from {live_side} anti join {new_side} on {on}"
    only_new = f"select b.run_id from {new_side} anti join {live_side} on {on}"
    rows = con.execute(f"{only_live} union {only_new} order by all", {"eps": ROLLUP_TOLERANCE}).fetchall()
    return [row[0] for row in rows]


def _difference(table: str) -> str:
    # A sum of row hashes is the same for the same rows in any order, and counts repeats.
    keys = "_run_id, _producer, _seq"
    old, new = (
        f"select {keys}, count(*), sum(hash({table})::hugeint) from {db}{table} group by all" for db in ("", "rebuilt.")
    )
    return f"select distinct {keys} from (({old} except {new}) union all ({new} except {old}))"


def _examples(what: str, names: list[str]) -> list[str]:
    more = [f"... and {len(names) - MAX_EXAMPLES} more: {what}"] if len(names) > MAX_EXAMPLES else []
    return [*(f"{name} {what}" for name in names[:MAX_EXAMPLES]), *more]
