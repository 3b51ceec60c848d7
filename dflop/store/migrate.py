"""Brings a database to the tables and views of `sql/`.

Migrations are `sql/migrations/NNNN_name.sql`, numbered 0001, 0002, ... without gaps, forward only;
`schema_migration` remembers the hash of each, and a file that was edited after it ran is refused. Views hold no
data: whenever a file of `sql/views` changed, views and macros are dropped and created again in file-name order, and
their columns take the comments of the columns that they show, all in the caller's transaction.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import duckdb

from dflop import resources
from dflop.errors import StoreError

_VIEW = re.compile(r"create or replace view (\w+)")
_SOURCE = re.compile(r"\b(?:from|join) (\w+)")
_OWN = "where not internal and database_name = current_database()"


def sql_files(folder: str, sql_root: Path | None = None) -> dict[Path, str]:
    """The texts of a folder of `sql/` (the project's own unless given), in order of the names of their files."""
    found = sorted(((sql_root or resources.path("sql")) / folder).glob("*.sql"))
    return {path: path.read_text(encoding="utf-8") for path in found}


def sha256_of(texts: Iterable[str]) -> str:
    """Hash of texts; what is compared to notice an edit."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def run(con: duckdb.DuckDBPyConnection, sql: str, path: Path, params: Mapping[str, Any] | None = None) -> None:
    """Runs the SQL of a file.

    Raises:
        StoreError: It does not run.
    """
    try:
        con.execute(sql, params)
    except duckdb.Error as error:
        raise StoreError(f"this SQL file does not run: {error}", where=str(path)) from error


def apply(con: duckdb.DuckDBPyConnection, sql_root: Path | None = None) -> list[str]:
    """Runs what is missing and returns the names of what ran; call it inside a transaction.

    Raises:
        StoreError: A migration that already ran was edited or is unknown here, or a file of `sql/` does not run.
    """
    migrations, applied = _migrations(sql_root), _applied(con)
    for (version, name, sha256), migration in itertools.zip_longest(applied, migrations[: len(applied)]):
        if migration is None:
            message = f"the store has migration {version:04d}_{name}, this dflop knows only up to {len(migrations):04d}"
            where = str((sql_root or resources.path("sql")) / "migrations")
            raise StoreError(message, where=where, hint="the store was written by a newer dflop: upgrade")
        if sha256_of([migration[1]]) != sha256:
            message = f"migration {version:04d}_{name} was edited after it ran on this store"
            hint = "restore the file and put the change into a new migration"
            raise StoreError(message, where=str(migration[0]), hint=hint)
    ran = migrations[len(applied) :]
    for path, text in ran:
        run(con, text, path)
        version, _, name = path.stem.partition("_")
        row = [int(version), name, sha256_of([text]), time.time()]
        con.execute("insert into schema_migration values (?, ?, ?, ?)", row)
    return [path.stem for path, _ in ran] + _apply_views(con, sql_files("views", sql_root))


def is_of_today(con: duckdb.DuckDBPyConnection) -> bool:
    """Whether a database has the tables and views of this dflop."""
    return len(_applied(con)) == len(sql_files("migrations")) and _has_views(con, sql_files("views"))


def _migrations(sql_root: Path | None) -> list[tuple[Path, str]]:
    found = sql_files("migrations", sql_root)
    for number, path in enumerate(found, 1):
        if not re.fullmatch(rf"{number:04d}_[a-z0-9_]+\.sql", path.name):
            hint = "migrations are named NNNN_name.sql and numbered from 0001 without gaps"
            raise StoreError(f"`{path.name}` is not the name of migration {number:04d}", where=str(path), hint=hint)
    return list(found.items())


def _applied(con: duckdb.DuckDBPyConnection) -> list[tuple[int, str, str]]:
    if not con.execute(f"select 1 from duckdb_tables() {_OWN} and table_name = 'schema_migration'").fetchone():
        return []
    return con.execute("select version, name, sha256 from schema_migration order by version").fetchall()


def _has_views(con: duckdb.DuckDBPyConnection, files: Mapping[Path, str]) -> bool:
    sql = "select 1 from store_meta where key = 'views_sha256' and value = ?"
    return con.execute(sql, [sha256_of(files.values())]).fetchone() is not None


def _apply_views(con: duckdb.DuckDBPyConnection, files: Mapping[Path, str]) -> list[str]:
    if _has_views(con, files):
        return []
    for (name,) in con.execute(f"select view_name from duckdb_views() {_OWN}").fetchall():
        con.execute(f'drop view "{name}"')
    macros = f"select distinct function_name, function_type from duckdb_functions() {_OWN}"
    for name, kind in con.execute(f"{macros} and function_type in ('macro', 'table_macro')").fetchall():
        con.execute(f'drop macro {"table " if kind == "table_macro" else ""}"{name}"')
    for path, text in files.items():
        run(con, text, path)
    _comment_columns(con, files.values())
    con.execute("insert or replace into store_meta values ('views_sha256', ?)", [sha256_of(files.values())])
    return ["views"]


def _comment_columns(con: duckdb.DuckDBPyConnection, texts: Iterable[str]) -> None:
    """Gives columns of views the comment of the column of their name in what the view reads; their own comes first."""
    comments: dict[str, dict[str, str | None]] = {}
    columns = con.execute(f"select table_name, column_name, comment from duckdb_columns() {_OWN}").fetchall()
    for relation, column, comment in columns:
        comments.setdefault(relation, {})[column] = comment
    statements = []
    for text in texts:
        sources = [comments.get(name, {}) for name in _SOURCE.findall(text)]
        for view in _VIEW.findall(text):
            for column in [column for column, comment in comments[view].items() if not comment]:
                shown = next((c for s in sources if (c := s.get(column) or s.get(f"{column}_s"))), None)
                if shown:
                    comments[view][column] = comment = shown.replace("seconds since the epoch (UTC)", "UTC")
                    quoted = comment.replace("'", "''")
                    statements.append(f'comment on column "{view}"."{column}" is \'{quoted}\'')
    con.execute(";".join(statements))
