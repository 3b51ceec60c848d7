"""Files that failed a check: kept, out of the way, each with its reason beside it.

    <store>/quarantine/<path below spool>.<first 12 digits of sha256>                the file, byte for byte
    <store>/quarantine/<path below spool>.<first 12 digits of sha256>.reason.json    why, for people and for a rebuild

The reason is on disk before the row, the row before the move: whatever is killed, the file is either still in the
spool and judged again, or in quarantine with its reason. The table `file_quarantine` is made from these files.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import duckdb

from dflop.errors import StoreError
from dflop.records import from_dict, parse_json, to_dict
from dflop.store import durable
from dflop.store.file_check import Bad

_REASON = ".reason.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of `file_quarantine`."""

    path: str
    sha256: str
    num_bytes: int
    reason: str
    quarantined_at_s: float


def write_reason(root: Path, bad: Bad) -> Entry:
    """Writes down why a file is about to move; writing it again changes only the time."""
    entry = Entry(bad.file.name, bad.sha256, bad.file.num_bytes, bad.reason, time.time())
    target = _target(root, bad)
    durable.make_folder(target.parent)
    durable.replace(target.with_name(target.name + _REASON), json.dumps(to_dict(entry), indent=1).encode())
    return entry


def move(root: Path, bad: Bad) -> None:
    """Takes the file out of the spool."""
    os.replace(bad.file.path, _target(root, bad))


def note(con: duckdb.DuckDBPyConnection, entries: list[Entry]) -> None:
    """Adds rows to `file_quarantine`; part of the caller's transaction."""
    for e in entries:
        con.execute(
            "insert or replace into file_quarantine values (?, ?, ?, ?, ?)",
            [e.path, e.sha256, e.num_bytes, e.reason, e.quarantined_at_s],
        )


def unknown(con: duckdb.DuckDBPyConnection, root: Path) -> list[Entry]:
    """Entries on disk that the database does not have.

    Raises:
        StoreError: A reason is damaged.
    """
    found = []
    known = set(con.execute("select path || '.' || sha256[:12] from file_quarantine").fetchall())
    for path in sorted((root / "quarantine").rglob(f"*{_REASON}")):
        file = path.with_name(path.name.removesuffix(_REASON))
        if (file.relative_to(root / "quarantine").as_posix(),) in known or not file.exists():
            continue
        try:
            found.append(from_dict(Entry, parse_json(path.read_text(encoding="utf-8"))))
        except (ValueError, TypeError) as error:
            told = f"damaged reason of a quarantined file: {error}"
            raise StoreError(told, where=str(path), hint="remove it") from None
    return found


def _target(root: Path, bad: Bad) -> Path:
    return root / "quarantine" / f"{bad.file.name}.{bad.sha256[:12]}"
