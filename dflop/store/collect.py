"""Removes what nobody needs any more: replaced snapshots after their grace period, and what killed processes left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflop import files
from dflop.store import live, snapshot
from dflop.store.live import Progress

TMP_AGE_S = 86_400.0
"""A temporary file this old belongs to nobody: the longest flush takes seconds."""


@dataclass(frozen=True, slots=True)
class GcReport:
    """What was removed, or would be."""

    removed: tuple[str, ...]
    """Paths below the store."""
    num_bytes: int


def gc(store_root: Path | str, *, dry_run: bool = False, say: Progress = live.silent) -> GcReport:
    """Collects garbage; the truth (spool, archive, quarantine, publish log) is never touched.

    Args:
        store_root: Folder of the store.
        dry_run: Only say what would go.
        say: Called with a line per file.

    Raises:
        StoreError: Another ingester holds the store, or a file cannot be removed.
    """
    root, removed, num_bytes = Path(store_root), [], 0
    with live.explained("gc failed", root), live.hold(root):
        for path in (*snapshot.expired(root), *_leftovers(root)):
            name = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
            num_bytes += path.stat().st_size
            removed.append(name)
            say(f"{'would remove' if dry_run else 'removed'} {name}")
            if not dry_run:
                path.unlink(missing_ok=True)
    return GcReport(tuple(removed), num_bytes)


def _leftovers(root: Path) -> Iterator[Path]:
    oldest_s = time.time() - TMP_AGE_S
    for folder in (root, live.live_file(root).parent):
        for path in sorted(folder.rglob(f"{files.TMP_PREFIX}*")):
            try:
                if path.lstat().st_mtime < oldest_s:
                    yield path
            except FileNotFoundError:
                continue  # its writer was alive after all
