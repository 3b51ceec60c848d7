"""Proves that the database, the newest snapshot and the files on disk say the same, or says where they differ.

Three comparisons: every file of the manifest is on disk with the recorded hash; the snapshot is, byte for byte, what
was published; and a database made again from the files holds the same rows in every table as the live one, compared
as multisets per spool file, so that a difference names the file. Roll-ups may differ in the last digits.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import duckdb

from dflop.store import archive, live, rebuild, schema, snapshot
from dflop.store.ingest import Ingested, ingest_pending, manifest
from dflop.store.live import Progress
from dflop.store.spool import SpoolKey, list_files

MAX_EXAMPLES = 5
ROLLUP_TOLERANCE = 1e-9
"""Relative and absolute: a parallel sum adds its terms in whichever order threads finish."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was compared."""

    num_files: int
    num_rows: int
    problems: tuple[str, ...]
    """One line each; empty when everything agrees."""
    elapsed_s: float


def verify(store_root: Path | str, say: Progress = live.silent) -> VerifyReport:
    """Compares live database, newest snapshot, spool and archive; changes nothing but ingests what is pending first.

    Takes about as long as a rebuild, and its disk space.

    Raises:
        StoreError: Another ingester holds the store, or the disk is full.
    """
    start_s, root = time.monotonic(), Path(store_root)
    with live.open_live(root, "cannot verify") as (con, lease):
        problems: list[str] = []
        ingest_pending(con, root, say, lease)
        snapshot.publish_if_stale(con, root, lease, problems.append)
        recorded = manifest(con)
        problems += [*_check_files(recorded, root), *_check_snapshot(root)]
        with rebuild.scratch(live.live_file(root).parent) as path:
            say("making the database again from the files")
            # Only what is in the manifest: files that arrive meanwhile are for the next pass.
            rebuild.fill(path, root, live.silent, only=set(recorded))
            problems += _compare(con, path)
        (num_rows,) = con.execute("select coalesce(sum(num_rows), 0) from ingest_manifest").fetchall()[0]
    return VerifyReport(len(recorded), int(num_rows), tuple(problems), time.monotonic() - start_s)


def _check_files(recorded: Mapping[SpoolKey, Ingested], root: Path) -> list[str]:
    found: dict[SpoolKey, str] = {}
    for file in archive.list_archive(root):
        found |= {g.key: g.sha256 for g in archive.read(file).files}
    for name, path in list_files(root):
        key = SpoolKey.parse(name)
        if key is not None and key in recorded:
            found[key] = hashlib.sha256(path.read_bytes()).hexdigest()
    missing = sorted(key.relative_path for key in recorded if key not in found)
    differing = sorted(
        key.relative_path for key, noted in recorded.items() if found.get(key) not in (None, noted.sha256)
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
    if sha256 != current.sha256:
        return [
            f"snapshot {current.seq} ({current.file}) is not what was published: sha256 {sha256}, not {current.sha256}"
        ]
    return []


def _compare(con: duckdb.DuckDBPyConnection, rebuilt: Path) -> list[str]:
    """Differences between the connected live database and one made from the files."""
    with live.attached(con, rebuilt, "rebuilt"):
        problems = []
        for kind in schema.KINDS:
            rows = con.execute(_difference(kind, "_run_id, _producer, _seq")).fetchall()
            differing = sorted(SpoolKey(kind, *row).relative_path for row in rows)
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
    rows = con.execute(
        f"select a.run_id from {live_side} anti join {new_side} on {on} "
        f"union select b.run_id from {new_side} anti join {live_side} on {on} order by all",
        {"eps": ROLLUP_TOLERANCE},
    ).fetchall()
    return [row[0] for row in rows]


def _difference(table: str, keys: str) -> str:
    # A sum of row hashes is the same for the same rows in any order, and counts repeats.
    side = "select {keys}, count(*) as n, sum(hash({table})::hugeint) as h from {db}{table} group by all"
    live_side = side.format(keys=keys, table=table, db="")
    new_side = side.format(keys=keys, table=table, db="rebuilt.")
    differing = f"({live_side} except {new_side}) union all ({new_side} except {live_side})"
    return f"select distinct {keys} from ({differing}) order by all"


def _examples(what: str, names: list[str]) -> list[str]:
    lines = [f"{name} {what}" for name in names[:MAX_EXAMPLES]]
    if len(names) > MAX_EXAMPLES:
        lines.append(f"... and {len(names) - MAX_EXAMPLES} more: {what}")
    return lines
