"""Tidies a store: many small spool files of a run become few large ones, and what nobody needs any more goes.

Fewer files are for the sake of the file system and of rebuilds. A spool file is touched only when its rows are in the
database, a day has passed since, and its run has enough of them. The archive is on disk and in the books before it
goes; killed in between, both exist and are one to the manifest. Identities survive (`archive.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import duckdb

from dflop import files
from dflop.errors import StoreError
from dflop.store import archive, file_check, live, schema, snapshot
from dflop.store.file_check import Good, StoredFile, Waiting
from dflop.store.ingest import Ingested, ingest_pending, manifest
from dflop.store.lease import Lease
from dflop.store.live import Progress
from dflop.store.spool import SpoolKey, encode

MIN_AGE_S = 86_400.0
"""A younger file may still be what a running job's next number is derived from, or what somebody is looking at."""
TMP_AGE_S = 86_400.0
"""A temporary file this old belongs to nobody: the longest flush takes seconds."""
MAX_BYTES = 256 << 20
"""Spool bytes per archive file; their rows are in memory together."""


@dataclass(slots=True)
class CompactReport:
    """What was compacted, or would be."""

    num_runs: int = 0
    num_files_before: int = 0
    num_files_after: int = 0
    num_bytes_before: int = 0
    num_bytes_after: int = 0
    """0 in a dry run."""


Group = list[tuple[SpoolKey, Ingested]]


def compact(
    store_root: Path | str,
    *,
    min_files: int = 16,
    min_age_s: float = MIN_AGE_S,
    dry_run: bool = False,
    say: Progress = live.silent,
) -> CompactReport:
    """Compacts every (kind, run) with at least `min_files` ingested spool files older than `min_age_s`."""
    root, runs, report = Path(store_root), set(), CompactReport()
    with live.open_live(root, "compact failed", hint="nothing is lost; try again") as (con, lease):
        if not dry_run:
            ingest_pending(con, root, say, lease)
        for group in _groups(con, root, min_files, min_age_s):
            key = group[0][0]
            runs.add(key.run_id)
            report.num_files_before += len(group)
            report.num_files_after += 1
            report.num_bytes_before += sum(noted.num_bytes for _, noted in group)
            if not dry_run:
                report.num_bytes_after += _compact_group(con, root, group, lease)
            say(f"{key.kind}/{key.run_id}: {len(group)} files {'would become' if dry_run else 'became'} 1")
        if not dry_run:
            snapshot.publish_if_stale(con, root, lease, say)
    report.num_runs = len(runs)
    return report


def gc(store_root: Path | str, *, dry_run: bool = False, say: Progress = live.silent) -> dict[str, int]:
    """Collects garbage, never the truth (spool, archive, quarantine, publish log); returns bytes by path."""
    root, removed = Path(store_root), {}
    with live.explained("gc failed", root), live.hold(root):
        for path in (*snapshot.expired(root), *_leftovers(root)):
            name = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
            removed[name] = path.lstat().st_size
            say(f"{'would remove' if dry_run else 'removed'} {name}")
            if not dry_run:
                path.unlink(missing_ok=True)
    return removed


def _groups(con: duckdb.DuckDBPyConnection, root: Path, min_files: int, min_age_s: float) -> Iterator[Group]:
    oldest_ns = int((time.time() - min_age_s) * 1e9)
    found = [
        (key, noted)
        for key, noted in sorted(manifest(con).items(), key=lambda item: item[0])
        if key.kind in schema.KINDS and noted.mtime_ns < oldest_ns and (root / "spool" / key.relative_path).exists()
    ]
    for _, of_run in itertools.groupby(found, key=lambda item: (item[0].kind, item[0].run_id)):
        for group in file_check.batches(of_run, lambda item: item[1].num_bytes, MAX_BYTES):
            if len(group) >= min_files:
                yield group


def _compact_group(con: duckdb.DuckDBPyConnection, root: Path, group: Group, lease: Lease) -> int:
    good = [_read(root, key, noted) for key, noted in group]
    lease.check()
    written = archive.write(root, good[0].key.kind, good[0].key.run_id, good)
    sha256, found = archive.read(written)  # as a rebuild will read it
    if [*map(_bytes, good)] != [*map(_bytes, found)]:  # unlike Arrow's equality, NaN equals NaN
        written.path.unlink()
        raise StoreError("the compacted file does not hold the rows of its spool files", where=str(written.path))
    with live.transaction(con, lease):
        archive.note(con, written, sha256, found)
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


def _bytes(good: Good) -> bytes:
    return encode(good.key, good.table.combine_chunks())


def _leftovers(root: Path) -> Iterator[Path]:
    oldest_s = time.time() - TMP_AGE_S
    for path in sorted({p for f in (root, live.live_file(root).parent) for p in f.rglob(f"{files.TMP_PREFIX}*")}):
        with contextlib.suppress(FileNotFoundError):  # its writer was alive after all
            if path.lstat().st_mtime < oldest_s:
                yield path
