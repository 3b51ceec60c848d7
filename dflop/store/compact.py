"""Rewrites the many small spool files of a run as few large ones, for the sake of the file system and of rebuilds.

A file is touched only when its rows are in the database, a day has passed since, and its run has enough of them. The
archive is on disk and in the books before a spool file goes; killed in between, both exist and are one to the
manifest. Identities survive (`archive.py`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from dflop import files
from dflop.errors import StoreError
from dflop.store import archive, file_check, live
from dflop.store.file_check import Good, StoredFile, Waiting
from dflop.store.ingest import Ingested, ingest_pending, manifest
from dflop.store.lease import Lease
from dflop.store.live import Progress
from dflop.store.snapshot import publish_if_stale
from dflop.store.spool import SpoolKey

MIN_AGE_S = 86_400.0
"""A younger file may still be what a running job's next number is derived from, or what somebody is looking at."""
MAX_BYTES = 256 << 20
"""Spool bytes per archive file; their rows are in memory together."""


@dataclass(frozen=True, slots=True)
class CompactReport:
    """What was compacted, or would be."""

    num_runs: int
    num_files_before: int
    num_files_after: int
    num_bytes_before: int
    num_bytes_after: int
    """0 in a dry run."""


Group = list[tuple[SpoolKey, Ingested]]
"""Files of one kind and run that become one."""


def compact(
    store_root: Path | str,
    *,
    min_files: int = 16,
    min_age_s: float = MIN_AGE_S,
    dry_run: bool = False,
    say: Progress = live.silent,
) -> CompactReport:
    """Compacts every (kind, run) with at least `min_files` ingested spool files older than `min_age_s`.

    Args:
        store_root: Folder of the store.
        min_files: Fewer files than this are not worth it.
        min_age_s: Seconds since a file was written.
        dry_run: Only say what would be done.
        say: Called with a line per group.

    Raises:
        StoreError: Another ingester holds the store, or the disk is full.
    """
    root, runs = Path(store_root), set()
    before = after = bytes_before = bytes_after = 0
    with live.open_live(root, "compact failed", hint="nothing is lost; try again") as (con, lease):
        if not dry_run:
            ingest_pending(con, root, say, lease)
        for group in _groups(con, root, min_files, min_age_s):
            key = group[0][0]
            runs.add(key.run_id)
            before, after = before + len(group), after + 1
            bytes_before += sum(noted.num_bytes for _, noted in group)
            if not dry_run:
                bytes_after += _compact_group(con, root, group, lease)
            say(f"{key.kind}/{key.run_id}: {len(group)} files {'would become' if dry_run else 'became'} 1")
        if not dry_run:
            publish_if_stale(con, root, lease, say)
    return CompactReport(len(runs), before, after, bytes_before, bytes_after)


def _groups(con: duckdb.DuckDBPyConnection, root: Path, min_files: int, min_age_s: float) -> Iterator[Group]:
    oldest_ns = int((time.time() - min_age_s) * 1e9)
    found = [
        (key, noted)
        for key, noted in sorted(manifest(con).items(), key=lambda item: item[0])
        if noted.mtime_ns < oldest_ns and (root / "spool" / key.relative_path).exists()
    ]
    for _, of_run in itertools.groupby(found, key=lambda item: (item[0].kind, item[0].run_id)):
        for group in file_check.batches(of_run, lambda item: item[1].num_bytes, MAX_BYTES):
            if len(group) >= min_files:
                yield group


def _compact_group(con: duckdb.DuckDBPyConnection, root: Path, group: Group, lease: Lease) -> int:
    good = [_read(root, key, noted) for key, noted in group]
    lease.check()
    written = archive.write(root, good[0].key.kind, good[0].key.run_id, good)
    found = archive.read(written)  # as a rebuild will read it
    if _content(con, good) != _content(con, found.files):
        written.path.unlink()
        raise StoreError("the compacted file does not hold the rows of its spool files", where=str(written.path))
    with live.transaction(con, lease):
        archive.note(con, found)
        live.touch(con)
    for g in good:
        g.file.path.unlink(missing_ok=True)
    files.fsync(good[0].file.path.parent)
    return written.num_bytes


def _read(root: Path, key: SpoolKey, noted: Ingested) -> Good:
    file = StoredFile(key.relative_path, root / "spool" / key.relative_path, noted.num_bytes, noted.mtime_ns)
    found = file_check.judge(file, None)
    if isinstance(found, Waiting) and isinstance(found.error, OSError):
        raise found.error
    if not isinstance(found, Good) or found.sha256 != noted.sha256:
        raise StoreError("a spool file is not what was ingested", where=str(file.path), hint="run `dflop store verify`")
    return found


def _content(con: duckdb.DuckDBPyConnection, files: Sequence[Good]) -> tuple[Any, ...]:
    """Identity of rows and their provenance; unlike Arrow's equality, NaN equals NaN."""
    with live.registered(con, file_check.with_provenance(files)) as incoming:
        content = f"count(*), sum(hash({incoming})::hugeint)"
        sql = f"select _producer, _seq, {content} from {incoming} group by all order by all"
        return tuple(con.execute(sql).fetchall())
