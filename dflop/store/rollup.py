"""Keeps per-run aggregates of the observations, so that a person's question about all history takes milliseconds.

Ten million observations with their microbatches are gigabytes; what people ask of them (steps, stages, errors, ranks)
is a thousandth of that. `sql/rollups/<n>_<table>.sql` is one SELECT that computes a table for the runs in `$run_ids`,
and may read the tables of files before it. Ingest remembers in `dirty_run` whose observations arrived; before a
snapshot is published those runs are computed again. Roll-ups hold nothing that the observations do not: a rebuild
makes them again, and so does an edited file.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import duckdb

from dflop import resources
from dflop.errors import StoreError
from dflop.store import live


def refresh(con: duckdb.DuckDBPyConnection, sql_root: Path | None = None) -> int:
    """Computes the roll-ups of all dirty runs; call it inside a transaction. Returns how many runs there were.

    Raises:
        StoreError: A file of `sql/rollups` does not run.
    """
    files = sorted(((sql_root or resources.path("sql")) / "rollups").glob("*.sql"))
    texts = [path.read_text(encoding="utf-8") for path in files]
    sha256 = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    if live.get_meta(con, "rollups_sha256") != sha256:
        con.execute("insert or ignore into dirty_run select distinct run_id from step_observation")
        for path in files:
            con.execute(f'delete from "{_table(path)}"')
        live.set_meta(con, "rollups_sha256", sha256)
    run_ids = [row[0] for row in con.execute("select run_id from dirty_run order by run_id").fetchall()]
    if not run_ids:
        return 0
    for path, text in zip(files, texts, strict=True):
        _compute(con, path, text, run_ids)
    con.execute("delete from dirty_run")
    return len(run_ids)


def mark(con: duckdb.DuckDBPyConnection, run_ids: set[str]) -> None:
    """Notes that observations of these runs have changed; part of the transaction that changes them."""
    if run_ids:
        con.execute("insert or ignore into dirty_run select unnest(?::varchar[])", [sorted(run_ids)])


def _compute(con: duckdb.DuckDBPyConnection, path: Path, text: str, run_ids: list[str]) -> None:
    table, params = _table(path), {"run_ids": run_ids}
    try:
        con.execute(f'delete from "{table}" where run_id in (select unnest($run_ids))', params)
        con.execute(f'insert into "{table}" by name {text}', params)
    except duckdb.Error as error:
        raise StoreError(f"this SQL file does not run: {error}", where=str(path)) from error


def _table(path: Path) -> str:
    return path.stem.partition("_")[2]
