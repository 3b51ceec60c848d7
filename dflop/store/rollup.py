"""Keeps per-run aggregates of the observations, so that a person's question about all history takes milliseconds.

Ten million observations with their microbatches are gigabytes; what people ask of them (steps, stages, errors, ranks)
is a thousandth of that. `sql/rollups/<n>_<table>.sql` is one SELECT that computes a table for the runs in `$run_ids`,
and may read the tables of files before it. Ingest remembers in `dirty_run` whose observations arrived; before a
snapshot is published those runs are computed again, after a rebuild or an edit of a file all of them.
"""

from __future__ import annotations

from pathlib import Path

import duckdb

from dflop.store import live, migrate


def refresh(con: duckdb.DuckDBPyConnection) -> int:
    """Computes the roll-ups of all dirty runs; call it inside a transaction. Returns how many runs there were."""
    files = migrate.sql_files("rollups")
    sha256 = migrate.sha256_of(files.values())
    if live.get_meta(con, "rollups_sha256") != sha256:
        con.execute("insert or ignore into dirty_run select distinct run_id from step_observation")
        for path in files:
            con.execute(f'delete from "{_table(path)}"')
        live.set_meta(con, "rollups_sha256", sha256)
    run_ids = [row[0] for row in con.execute("select run_id from dirty_run order by run_id").fetchall()]
    if not run_ids:
        return 0
    params = {"run_ids": run_ids}
    for path, text in files.items():
        con.execute(f'delete from "{_table(path)}" where run_id in (select unnest($run_ids))', params)
        migrate.run(con, f'insert into "{_table(path)}" by name {text}', path, params)
    con.execute("delete from dirty_run")
    return len(run_ids)


def _table(path: Path) -> str:
    return path.stem.partition("_")[2]
