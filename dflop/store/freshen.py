"""Bringing in what a run has just written, before a person is told about the run."""

from __future__ import annotations

import contextlib
from pathlib import Path

from dflop.errors import StoreError
from dflop.store import console, live, schema, settings, spool
from dflop.store.ingest import ingest


def freshen(store_root: Path | str, run_id: str) -> int:
    """Ingests if files of a run wait and nobody else is at it; returns how many of its files wait afterwards.

    Never in the way of others, and never slow: a busy store stays with whoever is at it, and a live database that this
    node would have to build first (`dflop store init --live`) is left to the nodes that have it.

    Args:
        store_root: Folder of the store.
        run_id: The run; what it compares (`<run_id>/compare`) comes with it.
    """
    root = Path(store_root)
    num_waiting = _num_waiting(root, run_id)
    kept_elsewhere = settings.read_settings(root).live and not live.live_file(root).is_file()
    if not num_waiting or kept_elsewhere:
        return num_waiting
    with contextlib.suppress(StoreError):
        ingest(root, lock_timeout_s=0.0)
    return _num_waiting(root, run_id)


def _num_waiting(root: Path, run_id: str) -> int:
    """Spool files of a run that the newest snapshot does not know."""
    folders = (root / "spool" / kind / run_id for kind in schema.KINDS)
    names = {path.relative_to(root / "spool").as_posix() for folder in folders for path in folder.rglob("*.parquet")}
    keys = {key for key in map(spool.SpoolKey.parse, names) if key is not None}
    if not keys:
        return 0
    sql = (
        "select kind, run_id, producer, seq from ingest_manifest where run_id = $run_id or starts_with(run_id, $below)"
    )
    try:
        known = console.query(root, sql, {"run_id": run_id, "below": f"{run_id}/"})[1]
    except StoreError:  # nothing was published yet
        return len(keys)
    return len(keys - {spool.SpoolKey(*row) for row in known})
