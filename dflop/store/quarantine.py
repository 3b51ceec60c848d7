"""Files that failed a check: kept, out of the way, each with its reason next to it.

The reason is on disk before the file moves: whatever is killed, the file is either still in the spool and judged
again, or in quarantine with its reason. The table `file_quarantine` is made from these files at the end of a pass.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import duckdb

from dflop.errors import StoreError
from dflop.records import from_dict, parse_json
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


def move(root: Path, bad: Bad) -> None:
    """Takes the file out of the spool."""
    target = root / "quarantine" / f"{bad.file.name}.{bad.sha256[:12]}"
    durable.make_folder(target.parent)
    write_reason(target, bad)
    os.replace(bad.file.path, target)


def write_reason(target: Path, bad: Bad) -> None:
    """Writes down why a file is about to move; writing it again changes only the time."""
    entry = Entry(bad.file.name, bad.sha256, bad.file.num_bytes, bad.reason, time.time())
    durable.replace(target.with_name(target.name + _REASON), json.dumps(dataclasses.asdict(entry), indent=1).encode())


def note_new(con: duckdb.DuckDBPyConnection, root: Path) -> int:
    """Adds what is in quarantine and not in `file_quarantine`, by other nodes too; returns how many files these are.

    Raises:
        StoreError: A reason is damaged.
    """
    known = set(con.execute("select path || '.' || sha256[:12] from file_quarantine").fetchall())
    folder, num_new = root / "quarantine", 0
    for path in sorted(folder.rglob(f"*{_REASON}")):
        file = path.with_name(path.name.removesuffix(_REASON))
        if (file.relative_to(folder).as_posix(),) in known or not file.exists():
            continue
        try:
            entry = from_dict(Entry, parse_json(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            message = f"damaged reason file of a rejected file: {error}"
            raise StoreError(message, where=str(path), hint="remove it") from None
        con.execute("insert or replace into file_quarantine values (?, ?, ?, ?, ?)", [*dataclasses.astuple(entry)])
        num_new += 1
    return num_new
