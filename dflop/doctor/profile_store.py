"""The profile store: does it open, who is at it, what waits, and can its folder do what the store relies on."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from dflop import units
from dflop.doctor.finding import FAIL, OK, SKIP, WARN, Finding, checked
from dflop.errors import DflopError
from dflop.store import access, health, retention

AREA = "store"
OLD_S = 3600.0
"""Spool files that wait longer have been forgotten."""


def profile_store(root: Path) -> Iterator[Finding]:
    """Findings about the store in a folder."""
    try:
        os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        yield Finding(AREA, "folder", SKIP, f"no store at {root} yet", "the first profile creates it")
        return
    except OSError as error:
        failure = access.error_of("cannot read the store", error, root)
        yield Finding(AREA, "folder", FAIL, failure.what, failure.hint)
        return
    yield checked(AREA, "snapshot", lambda: health.snapshot_health(root))
    yield _room(root)
    yield checked(AREA, "live database", lambda: health.live_health(root))
    yield checked(AREA, "lease", lambda: health.lease_health(root))
    yield _backlog(root)
    files = [path for path in (root / "quarantine").rglob("*.parquet.*") if not path.name.endswith(".reason.json")]
    if files:
        advice = "the .reason.json file of each has the reason, as has the table file_quarantine"
        yield Finding(AREA, "quarantine", WARN, f"{len(files)} files in {root / 'quarantine'}", advice)
    else:
        yield Finding(AREA, "quarantine", OK, "no file was rejected")


def _room(root: Path) -> Finding:
    """Whether the next snapshots fit on the disk."""
    try:
        sizes, detail = (
            [path.stat().st_size for path in retention.snapshots(root).values()],
            health.room_of_snapshots(root),
        )
        free_bytes = shutil.disk_usage(root).free
    except (DflopError, OSError) as error:
        return Finding(AREA, "room for snapshots", SKIP, f"unknown: {error}")
    detail += f"; {units.num_bytes(free_bytes)} are free"
    if free_bytes > 2 * max(sizes, default=0):
        return Finding(AREA, "room for snapshots", OK, detail)
    return Finding(
        AREA, "room for snapshots", WARN, detail, f"dflop store gc --store {root}, or free space: a snapshot is a copy"
    )


def _backlog(root: Path) -> Finding:
    try:
        waiting = health.waiting_files(root)
        ages_s = [time.time() - path.stat().st_mtime for path in waiting]
    except (DflopError, OSError):
        return Finding(AREA, "spool", SKIP, "unknown without a snapshot")
    if not waiting:
        return Finding(AREA, "spool", OK, "nothing to ingest")
    detail = f"{len(waiting)} files not ingested yet, the oldest for {units.seconds(max(ages_s))}"
    if max(ages_s) < OLD_S:
        return Finding(AREA, "spool", OK, detail)
    return Finding(AREA, "spool", WARN, detail, f"dflop store ingest --store {root} (--watch for ever)")
