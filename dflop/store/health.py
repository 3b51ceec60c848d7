"""Whether a store is well, looked at from outside: nothing is written but a lock file's content, nothing is mended."""

from __future__ import annotations

import re
import time
from pathlib import Path

import duckdb

from dflop import units
from dflop.errors import StoreError
from dflop.records import parse_json
from dflop.store import access, console, lock, settings, snapshot

_CLAIM = re.compile(r"(\d{6,})\.json")


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
    path = settings.read_settings(root).live_file(root)
    if not path.exists():
        return f"none on this machine: the next ingest makes it ({path})"
    try:
        # DuckDB looks at the file before it locks it, so whoever opens it holds the ingest lock.
        with lock.exclusive(root / "ingest.lock", timeout_s=0):
            _open(root, path)
    except OSError as error:
        raise access.error_of("cannot open the live database", error, root) from error
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
    folder = root / "INGEST.lease"
    claims = sorted((int(m[1]), path) for path in folder.glob("*.json") if (m := _CLAIM.fullmatch(path.name)))
    if not claims:
        return "never held"
    epoch, path = claims[-1]
    try:
        claim = parse_json(path.read_bytes())
        who = f"pid {claim['pid']} on {claim['host']} since {claim['since']}"
        is_released = bool(claim["is_released"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "if nobody ingests (`dflop doctor` on the other nodes), remove this file"
        raise StoreError(f"claim {epoch} is damaged: {error}", where=str(path), hint=hint) from None
    if is_released:
        return f"free; epoch {epoch}, last {who}"
    age_s, limit_s = time.time() - path.stat().st_mtime, settings.read_settings(root).lease_s
    if age_s > limit_s:
        return f"free: {who} was last heard of {units.seconds(age_s)} ago (limit {units.seconds(limit_s)})"
    return f"held by {who}, heard of {units.seconds(max(age_s, 0))} ago"


def _open(root: Path, path: Path) -> None:
    try:
        with duckdb.connect(str(path), read_only=True) as con:
            con.execute("select count(*) from ingest_manifest").fetchone()
    except duckdb.Error as error:
        if access.is_denied(error):
            raise access.error_of("cannot open the live database", error, root) from error
        raise StoreError(
            f"cannot open the live database: {str(error).splitlines()[0]}",
            where=str(path),
            hint="the spool is the truth: run `dflop store rebuild`",
        ) from error
