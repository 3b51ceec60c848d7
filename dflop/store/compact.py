"""Rewrites the many small spool files of a run as few large ones, for the sake of the file system and of rebuilds.

A file is touched only when its rows are in the database, a day has passed since, and its run has enough of them. The
archive is on disk and in the books before a spool file goes; killed in between, both exist and are one to the
manifest. Identities survive (`archive.py`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from dflop.errors import StoreError
from dflop.store import access, archive, durable, file_check, live
from dflop.store.file_check import Good, SpoolFile
from dflop.store.ingest import Progress, ingest_pending
from dflop.store.lease import Lease
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


@dataclass(frozen=True, slots=True)
class _Group:
    kind: str
    run_id: str
    files: tuple[SpoolFile, ...]
    sha256: dict[str, str]


def compact(
    store_root: Path | str,
    *,
    min_files: int = 16,
    min_age_s: float = MIN_AGE_S,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> CompactReport:
    """Compacts every (kind, run) with at least `min_files` ingested spool files older than `min_age_s`.

    Args:
        store_root: Folder of the store.
        min_files: Fewer files than this are not worth it.
        min_age_s: Seconds since a file was written.
        dry_run: Only say what would be done.
        progress: Called with a line per group.

    Raises:
        StoreError: Another ingester holds the store, or the disk is full.
    """
    root, say = Path(store_root), progress or (lambda _line: None)
    runs: set[str] = set()
    before = after = bytes_before = bytes_after = 0
    try:
        with live.hold(root) as lease, live.connect(live.live_file(root)) as con:
            if not dry_run:
                ingest_pending(con, root, say, lease)
            for group in _groups(con, root, min_files, min_age_s):
                runs.add(group.run_id)
                before, after = before + len(group.files), after + 1
                bytes_before += sum(f.num_bytes for f in group.files)
                if not dry_run:
                    bytes_after += _compact_group(con, root, group, lease)
                say(
                    f"{group.kind}/{group.run_id}: {len(group.files)} files {'would become' if dry_run else 'became'} 1"
                )
            if not dry_run:
                publish_if_stale(con, root, lease, say)
    except (duckdb.Error, OSError) as error:
        raise access.error_of("compact failed", error, root, hint="nothing is lost; try again") from error
    return CompactReport(len(runs), before, after, bytes_before, bytes_after)


def _groups(con: duckdb.DuckDBPyConnection, root: Path, min_files: int, min_age_s: float) -> Iterator[_Group]:
    rows = con.execute(
        "select kind, run_id, producer, seq, sha256, num_bytes, mtime_ns from ingest_manifest where mtime_ns < ? "
        "order by kind, run_id, producer, seq",
        [int((time.time() - min_age_s) * 1e9)],
    ).fetchall()
    by_run: dict[tuple[str, str], list[tuple[SpoolFile, str]]] = {}
    for kind, run_id, producer, seq, sha256, num_bytes, mtime_ns in rows:
        name = SpoolKey(kind, run_id, producer, seq).relative_path
        path = root / "spool" / name
        if path.exists():
            by_run.setdefault((kind, run_id), []).append((SpoolFile(name, path, num_bytes, mtime_ns), sha256))
    for (kind, run_id), found in by_run.items():
        for part in _parts(found):
            if len(part) >= min_files:
                yield _Group(kind, run_id, tuple(f for f, _ in part), {f.name: sha256 for f, sha256 in part})


def _parts(found: list[tuple[SpoolFile, str]]) -> Iterator[list[tuple[SpoolFile, str]]]:
    part: list[tuple[SpoolFile, str]] = []
    num_bytes = 0
    for item in found:
        if part and num_bytes + item[0].num_bytes > MAX_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append(item)
        num_bytes += item[0].num_bytes
    if part:
        yield part


def _compact_group(con: duckdb.DuckDBPyConnection, root: Path, group: _Group, lease: Lease) -> int:
    good = [_read(file, group.sha256[file.name]) for file in group.files]
    lease.check()
    written = archive.write(root, group.kind, group.run_id, good)
    found = archive.read(written)  # as a rebuild will read it
    if _content(con, good) != _content(con, found.files):
        written.path.unlink()
        raise StoreError("the compacted file does not hold the rows of its spool files", where=str(written.path))
    with live.transaction(con, lease):
        archive.note(con, found)
        live.touch(con)
    for file in group.files:
        file.path.unlink(missing_ok=True)
    durable.fsync_folder(group.files[0].path.parent)
    return written.num_bytes


def _read(file: SpoolFile, sha256: str) -> Good:
    data = file.path.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise StoreError("a spool file is not what was ingested", where=str(file.path), hint="run `dflop store verify`")
    key = SpoolKey.parse(file.name)
    assert key is not None
    return Good(file, key, sha256, file_check.decode(key, data))


def _content(con: duckdb.DuckDBPyConnection, files: Sequence[Good]) -> tuple[Any, ...]:
    """Identity of rows and their provenance; unlike Arrow's equality, NaN equals NaN."""
    with live.registered(con, file_check.with_provenance(files)) as incoming:
        content = f"count(*), sum(hash({incoming})::hugeint)"
        sql = f"select _producer, _seq, {content} from {incoming} group by all order by all"
        return tuple(con.execute(sql).fetchall())
