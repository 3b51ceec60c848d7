"""Records into a store, and questions to it."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dflop.records import Correction
from dflop.store import console, live, schema
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.spool import SpoolWriter

CLIENTS = Path(sys.prefix) / "clients"
VERSIONS = ("1.4", "1.5", "2.0")


def begin(database: Path) -> None:
    """A new database begins as a copy of an empty one: migrations are half of what a first ingest costs."""
    if not database.exists():
        database.parent.mkdir(parents=True, exist_ok=True)
        database.write_bytes(_empty_database())


def write(root: Path, *records: Any, run_id: str = "run", producer: str = "p") -> Path:
    """Writes records to the spool; returns the newest file of the last one's kind."""
    begin(live.live_file(root))
    with SpoolWriter(root, run_id, producer) as writer:
        for record in records:
            writer.append(record)
    return max((root / "spool" / schema.kind_of(type(records[-1])) / run_id).glob(f"{producer}-*"))


def fill(root: Path, *records: Any, run_id: str = "run", producer: str = "p") -> Path:
    """Takes records into a store."""
    write(root, *records, run_id=run_id, producer=producer)
    ingest(root)
    return root


@functools.cache
def _empty_database() -> bytes:
    with tempfile.TemporaryDirectory(prefix="store-") as folder:
        live.migrate_store(Path(folder))
        return live.live_file(Path(folder)).read_bytes()


def stored(root: Path, cls: type = Correction) -> list[Any]:
    """All records of a class in the newest snapshot."""
    with Reader(root) as reader:
        return reader.records(cls)


def rows(root: Path, sql: str, /, **params: Any) -> list[dict[str, Any]]:
    columns, found = console.query(root, sql, params or None)
    return [dict(zip(columns, row, strict=True)) for row in found]


def named(root: Path, query: str, /, **params: Any) -> list[dict[str, Any]]:
    """Rows of a query that the console knows."""
    return rows(root, console.named_query(query).sql, **params)


def ask_client(version: str, code: str, root: Path) -> Any:
    """The JSON that Python code prints about a snapshot, its path in `sys.argv`, under another version of duckdb."""
    client = CLIENTS / version
    if not client.is_dir():
        pytest.skip(f"duckdb {version} is not installed beside the environment (make clients)")
    command = [sys.executable, "-c", code, str(root / "current.duckdb")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(client)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("version").startswith(version)
    return found
