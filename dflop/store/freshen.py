"""What jobs have written and no snapshot holds yet, and bringing it in before a person is told about a run."""

from __future__ import annotations

import contextlib
from pathlib import Path

from dflop.errors import StoreError
from dflop.store import access, console, live, schema, settings, spool
from dflop.store.ingest import ingest


def waiting_files(store_root: Path | str, run_id: str = "") -> list[Path]:
    """Spool files that the newest snapshot does not know, in order of their names; all of them before the first one.

    Files that no spool writer can have written count, too: they wait for an ingester that puts them in quarantine.

    Args:
        store_root: Folder of the store.
        run_id: Only of this run; what it compares (`<run_id>/compare`) comes with it.

    Raises:
        StoreError: the newest snapshot or a folder of the spool cannot be read.
    """
    root = Path(store_root)
    try:
        files = _spooled(root, run_id)
    except OSError as error:
        raise access.error_of("what waits cannot be told", error, root) from error
    known: set[spool.SpoolKey | None] = set()
    if files and (root / "CURRENT").exists():
        sql = "select kind, run_id, producer, seq from ingest_manifest where starts_with(run_id, $run_id)"
        known = {spool.SpoolKey(*row) for row in console.query(root, sql, {"run_id": run_id})[1]}
    return [path for key, path in files if key not in known]


def freshen(store_root: Path | str, run_id: str) -> int:
    """Ingests if files of a run wait and nobody else is at it; returns how many of its files wait afterwards.

    Never in the way of others, and never slow: a busy store stays with whoever is at it, and a live database that this
    node would have to build first (`dflop store init --live`) is left to the nodes that have it.

    Raises:
        StoreError: settings are damaged.
        OSError: a folder of the spool cannot be read.
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
    try:
        return len(waiting_files(root, run_id))
    except StoreError:  # the newest snapshot does not open: an ingest publishes another one
        return len(_spooled(root, run_id))


def _spooled(root: Path, run_id: str) -> list[tuple[spool.SpoolKey | None, Path]]:
    places = [f"{kind}/{run_id}" for kind in schema.KINDS] if run_id else [""]
    return [(spool.SpoolKey.parse(name), path) for place in places for name, path in spool.list_files(root, place)]
