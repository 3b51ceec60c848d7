"""Brings a database to the tables and views of `sql/`.

Migrations are `sql/migrations/NNNN_name.sql`, numbered 0001, 0002, ... without gaps, forward only;
`schema_migration` remembers the hash of each, and a file that was edited after it ran is refused. Views hold no
data: whenever a file of `sql/views` changed, views and macros are dropped and created again in file-name order, and
their columns take the comments of the columns that they show. The caller's transaction makes the whole step
all-or-nothing.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb

from dflop import resources
from dflop.errors import StoreError

_FILE = re.compile(r"(?P<version>\d{4})_(?P<name>[a-z0-9_]+)\.sql")
_VIEW = re.compile(r"create or replace view (\w+)")
_SOURCE = re.compile(r"\b(?:from|join) (\w+)")


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered file of `sql/migrations`."""

    version: int
    name: str
    sql: str

    @property
    def sha256(self) -> str:
        """Hash of the text; what is compared to notice an edit."""
        return hashlib.sha256(self.sql.encode()).hexdigest()


def discover(folder: Path) -> list[Migration]:
    """Migrations of `folder` in order.

    Raises:
        StoreError: A file name is not `NNNN_name.sql`, or a number is missing or used twice.
    """
    found = []
    for path in sorted(folder.glob("*.sql")):
        match = _FILE.fullmatch(path.name)
        if not match:
            raise StoreError(f"migration `{path.name}` is not named NNNN_name.sql", where=str(folder))
        found.append(Migration(int(match["version"]), match["name"], path.read_text(encoding="utf-8")))
    versions = [m.version for m in found]
    if versions != list(range(1, len(found) + 1)):
        raise StoreError(
            f"migrations must be numbered 1..{len(found)} without gaps; found {versions}", where=str(folder)
        )
    return found


def apply(con: duckdb.DuckDBPyConnection, sql_root: Path | None = None) -> list[str]:
    """Runs what is missing and returns the names of what ran; call it inside a transaction.

    Args:
        con: Database to bring up to date.
        sql_root: The `sql/` folder; the project's own unless given.

    Raises:
        StoreError: A migration that already ran was edited or is unknown here, or a file of `sql/` does not run.
    """
    sql_root = sql_root or resources.path("sql")
    migrations = discover(sql_root / "migrations")
    applied = _applied(con)
    _check_history(migrations, applied, sql_root / "migrations")
    ran = []
    for migration in migrations[len(applied) :]:
        label = f"{migration.version:04d}_{migration.name}"
        _run(con, migration.sql, sql_root / "migrations" / f"{label}.sql")
        con.execute(
            "insert into schema_migration values (?, ?, ?, ?)",
            [migration.version, migration.name, migration.sha256, time.time()],
        )
        ran.append(label)
    return ran + _apply_views(con, sql_root / "views")


def _applied(con: duckdb.DuckDBPyConnection) -> list[tuple[int, str, str]]:
    exists = con.execute(
        "select 1 from duckdb_tables() where table_name = 'schema_migration' and database_name = current_database()"
    ).fetchone()
    if not exists:
        return []
    return con.execute("select version, name, sha256 from schema_migration order by version").fetchall()


def _check_history(migrations: list[Migration], applied: list[tuple[int, str, str]], folder: Path) -> None:
    for version, name, sha256 in applied:
        if version > len(migrations):
            raise StoreError(
                f"the store has migration {version:04d}_{name}, this dflop knows only up to {len(migrations):04d}",
                where=str(folder),
                hint="the store was written by a newer dflop: upgrade this one",
            )
        if migrations[version - 1].sha256 != sha256:
            raise StoreError(
                f"migration {version:04d}_{name} was edited after it ran on this store",
                where=str(folder),
                hint="restore the file and put the change into a new migration",
            )


def _apply_views(con: duckdb.DuckDBPyConnection, folder: Path) -> list[str]:
    files = sorted(folder.glob("*.sql"))
    texts = [path.read_text(encoding="utf-8") for path in files]
    sha256 = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    if con.execute("select 1 from store_meta where key = 'views_sha256' and value = ?", [sha256]).fetchone():
        return []
    own = "where not internal and database_name = current_database()"
    for (name,) in con.execute(f"select view_name from duckdb_views() {own}").fetchall():
        con.execute(f'drop view "{name}"')
    macros = con.execute(
        "select distinct function_name, function_type = 'table_macro' from duckdb_functions() "
        f"{own} and function_type in ('macro', 'table_macro')"
    ).fetchall()
    for name, is_table in macros:
        con.execute(f'drop macro {"table " if is_table else ""}"{name}"')
    for path, text in zip(files, texts, strict=True):
        _run(con, text, path)
    _comment_columns(con, texts)
    con.execute("insert or replace into store_meta values ('views_sha256', ?)", [sha256])
    return ["views"]


def _comment_columns(con: duckdb.DuckDBPyConnection, texts: Sequence[str]) -> None:
    """Gives columns of views the comment of the column of their name in what the view reads; their own comes first.

    Args:
        con: Database with the views.
        texts: Files that made them, those that are read by others before these.
    """
    comments: dict[str, dict[str, str | None]] = {}
    for relation, column, comment in con.execute(
        "select table_name, column_name, comment from duckdb_columns() "
        "where not internal and database_name = current_database()"
    ).fetchall():
        comments.setdefault(relation, {})[column] = comment
    statements = []
    for text in texts:
        sources = [comments.get(name, {}) for name in _SOURCE.findall(text)]
        for view in _VIEW.findall(text):
            own = comments[view]
            for column in [column for column, comment in own.items() if not comment]:
                shown = next((c for s in sources if (c := s.get(column) or s.get(f"{column}_s"))), None)
                if shown:
                    own[column] = comment = shown.replace("seconds since the epoch (UTC)", "UTC")
                    quoted = comment.replace("'", "''")
                    statements.append(f'comment on column "{view}"."{column}" is \'{quoted}\'')
    con.execute(";".join(statements))


def _run(con: duckdb.DuckDBPyConnection, sql: str, path: Path) -> None:
    try:
        con.execute(sql)
    except duckdb.Error as error:
        raise StoreError(f"this SQL file does not run: {error}", where=str(path)) from error
