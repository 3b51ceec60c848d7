"""What jobs have written and no snapshot holds yet."""

from __future__ import annotations

from pathlib import Path

from dflop.store import access, console, spool


def waiting_files(store_root: Path | str) -> list[Path]:
    """Spool files that the newest snapshot does not know, in order of their names; all of them before the first one.

    Files that no spool writer can have written count, too: they wait for an ingester that puts them in quarantine.

    Raises:
        StoreError: the newest snapshot or a folder of the spool cannot be read.
    """
    root = Path(store_root)
    try:
        files = [(spool.SpoolKey.parse(name), path) for name, path in spool.list_files(root)]
    except OSError as error:
        raise access.error_of("what waits cannot be told", error, root) from error
    known: set[spool.SpoolKey | None] = set()
    if files and (root / "CURRENT").exists():
        sql = "select kind, run_id, producer, seq from ingest_manifest"
        known = {spool.SpoolKey(*row) for row in console.query(root, sql)[1]}
    return [path for key, path in files if key not in known]
