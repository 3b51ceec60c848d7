"""Whether a store is well, looked at from outside: nothing stays but a lock file's content, nothing is mended."""

from __future__ import annotations

import time
from pathlib import Path

from dflop import units
from dflop.errors import StoreError
from dflop.store import console, durable, lease, live, lock, settings, snapshot


def snapshot_health(root: Path) -> str:
    """What the newest snapshot is; it opens and answers.

    Raises:
        StoreError: it does not, or CURRENT is damaged.
    """
    current = snapshot.read_current(root)
    if current is None:
        return "none yet: it comes with the first ingest"
    (num_files,) = console.query(root, "select count(*) from ingest_manifest")[1][0]
    age, size = units.seconds(time.time() - current.published_at_s), (root / current.file).stat().st_size
    return f"{current.seq}, {age} old, {units.num_bytes(size)}, rows of {num_files} files"


def live_health(root: Path) -> str:
    """What the live database is; it opens, unless an ingester is at it.

    Raises:
        StoreError: it does not open, or settings are damaged.
    """
    path = live.live_file(root)
    if not path.exists():
        return f"none on this machine: the next ingest makes it ({path})"
    try:
        # DuckDB looks at the file before it locks it, so whoever opens it holds the ingest lock.
        with live.explained("cannot open the live database", root), lock.exclusive(root / "ingest.lock", timeout_s=0):
            live.check(path)
    except StoreError as error:
        if "is ingesting" in error.what:
            return f"in use: {error.what}"
        raise
    return f"{path}, {units.num_bytes(path.stat().st_size)}"


def lease_health(root: Path) -> str:
    """Who holds the lease, or held it last.

    Raises:
        StoreError: the newest claim cannot be read.
    """
    claims = durable.numbered(root / lease.FOLDER, ".json")
    if not claims:
        return "never held"
    epoch, path = max(claims.items())
    try:
        claim = lease.read_claim(path)
    except (OSError, ValueError, TypeError) as error:
        hint = "if nobody ingests (`dflop doctor` on the other nodes), remove this file"
        raise StoreError(f"claim {epoch} is damaged: {error}", where=str(path), hint=hint) from None
    if claim.is_released:
        return f"free; epoch {epoch}, last {claim}"
    limit_s = settings.read_settings(root).lease_s
    if claim.age_s > limit_s:
        return f"free: {claim} was last heard of {units.seconds(claim.age_s)} ago (limit {units.seconds(limit_s)})"
    return f"held by {claim}, heard of {units.seconds(max(claim.age_s, 0))} ago"
