"""Which snapshots stay, and how often one is published while rows keep arriving.

A snapshot is a copy of the whole database, so both follow its size. The newest few stay; of those that were replaced
within the grace period one per sixth of it, while all together take at most a multiple of the newest. A snapshot that
another process reads stays through its grace period all the same: DuckDB holds a POSIX read lock on it, which other
nodes see where the mount has locks. Readers of a snapshot that was removed finish on a local disk.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import struct
import time
from pathlib import Path

import duckdb

from dflop.store import durable, publishes, settings

PUBLISH_EVERY_S = 300.0
"""A pass that is not urgent publishes when the newest snapshot is this old."""
BYTES_PER_S = 4e6
"""Sooner where less than this is written: every 25 s for 100 MB."""
NUM_SLOTS = 6
"""Slots of the grace period; one snapshot stays in each."""
_FLOCK = "hhqqi4x"
"""Linux's `struct flock` of a 64-bit machine."""


def snapshots(store_root: Path) -> dict[int, Path]:
    """All snapshots by number, in order."""
    return durable.numbered(store_root / "snapshots", ".duckdb", "dflop-")


def is_due(con: duckdb.DuckDBPyConnection, store_root: Path, num_bytes: int, published_at_s: float) -> bool:
    """Whether the newest snapshot is old for its size, or lacks a decision of the live database."""
    age_s = time.time() - published_at_s
    if not 0 <= age_s < min(PUBLISH_EVERY_S, num_bytes / BYTES_PER_S):  # below 0: another node's clock
        return True
    sql = "from ingest_manifest where kind = 'decision' and (snapshot_seq is null or snapshot_seq > ?) limit 1"
    return bool(con.execute(sql, [publishes.last_seq(store_root)]).fetchall())


def expired(store_root: Path, current_seq: int) -> list[Path]:
    """Snapshots that nobody needs, never the newest ones nor the current one."""
    rules, found = settings.read_settings(store_root), snapshots(store_root)
    sizes = {path: path.stat().st_size for path in found.values()}
    now_s, slots, gone, kept = time.time(), set[int](), list[Path](), list[Path]()
    # A snapshot was replaced when the next one appeared, however old it is itself.
    replaced = list(itertools.pairwise(found.items()))
    for (seq, path), (_, successor) in replaced[: max(len(found) - rules.keep_snapshots, 0)]:
        slot = int(path.stat().st_mtime // max(rules.grace_s / NUM_SLOTS, 1.0))
        if seq == current_seq:
            continue
        if now_s - successor.stat().st_mtime > rules.grace_s:
            gone.append(path)
        elif not is_read(path):
            (gone if slot in slots else kept).append(path)
        slots.add(slot)
    limit_bytes = rules.max_snapshots_ratio * max([*sizes.values()][-1:], default=0)
    while kept and sum(sizes.values()) - sum(sizes[path] for path in gone) > limit_bytes:
        gone.append(kept.pop(0))
    return sorted(gone)


def is_read(path: Path) -> bool:
    """Whether another process has a snapshot open, as far as locks say."""
    question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with open(path, "rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, question)
    except OSError:  # a mount without locks
        return False
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
