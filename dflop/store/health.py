"""Whether a store is well and what waits for it, looked at from outside: nothing is mended."""

from __future__ import annotations

import time
from pathlib import Path

from dflop import units
from dflop.errors import StoreError
from dflop.store import access, console, durable, lease, live, retention, schema, settings, snapshot, spool


def snapshot_health(root: Path) -> str:
    """What the newest snapshot is; it opens and answers, or there is a StoreError."""
    current = snapshot.read_current(root)
    if current is None:
        return "none yet: the first ingest creates it"
    (num_files,) = console.query(root, "select count(*) from ingest_manifest")[1][0]
    age, size = units.seconds(time.time() - current.published_at_s), (root / current.file).stat().st_size
    return f"{current.seq}, {age} old, {units.num_bytes(size)}, rows of {num_files} files"


def room_of_snapshots(root: Path) -> str:
    """How many snapshots there are, what they take, and the limit."""
    sizes = [path.stat().st_size for path in retention.snapshots(root).values()]
    limit = settings.read_settings(root).max_snapshots_ratio * sizes[-1] if sizes else 0
    return f"{len(sizes)} snapshots take {units.num_bytes(sum(sizes))} (limit {units.num_bytes(round(limit))})"


def live_health(root: Path) -> str:
    """What the live database is; it opens, unless an ingester is at it, or there is a StoreError."""
    path = live.live_file(root)
    if not path.exists():
        return f"none on this machine: the next ingest creates it ({path})"
    try:
        # DuckDB looks at the file before it locks it, so whoever opens it holds the ingest lock.
        with (
            live.explained("cannot open the live database", root), lease.exclusive(root / "ingest.lock", timeout_s=0),
            live.opened(path, read_only=True) as con,
        ):  # fmt: skip
            con.execute("select count(*) from ingest_manifest").fetchone()
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
        hint = "if no ingest runs (`dflop doctor` on the other nodes), remove this file"
        raise StoreError(f"claim {epoch} is damaged: {error}", where=str(path), hint=hint) from None
    if claim.is_released:
        return f"free; epoch {epoch}, last {claim}"
    limit_s = settings.read_settings(root).lease_s
    if claim.age_s > limit_s:
        return (
            f"free: {claim} sent its last heartbeat {units.seconds(claim.age_s)} ago (limit {units.seconds(limit_s)})"
        )
    return f"held by {claim}, last heartbeat {units.seconds(max(claim.age_s, 0))} ago"


def waiting_files(store_root: Path | str, run_id: str = "") -> list[Path]:
    """Spool files that the newest snapshot does not know, in order of their names; all of them before the first one.

    Of a run its own and what it compares. Files that no spool writer can have written count: quarantine awaits them.
    """
    root = Path(store_root)
    try:
        files = spooled(root, run_id)
    except OSError as error:
        raise access.error_of("files not ingested yet: unknown", error, root) from error
    known: set[spool.SpoolKey | None] = set()
    if files and (root / "CURRENT").exists():
        sql = "select kind, run_id, producer, seq from ingest_manifest where starts_with(run_id, $run_id)"
        known = {spool.SpoolKey(*row) for row in console.query(root, sql, {"run_id": run_id})[1]}
    return [path for key, path in files if key not in known]


def spooled(root: Path, run_id: str) -> list[tuple[spool.SpoolKey | None, Path]]:
    """Spool files with their keys, or only those of a run."""
    places = [f"{kind}/{run_id}" for kind in schema.KINDS] if run_id else [""]
    return [(spool.SpoolKey.parse(name), path) for place in places for name, path in spool.list_files(root, place)]
