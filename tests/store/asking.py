"""Records into a store, and questions to it, for tests of views and queries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflop.store import console
from dflop.store.spool import SpoolWriter


def write(root: Path, *records: Any, run_id: str = "run") -> None:
    with SpoolWriter(root, run_id, "p") as writer:
        for record in records:
            writer.append(record)


def rows(root: Path, sql: str, /, **params: Any) -> list[dict[str, Any]]:
    columns, found = console.query(root, sql, params or None)
    return [dict(zip(columns, row, strict=True)) for row in found]


def named(root: Path, query: str, /, **params: Any) -> list[dict[str, Any]]:
    """Rows of a query that the console knows."""
    return rows(root, console.named_query(query).sql, **params)
