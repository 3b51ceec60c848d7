"""SQL for people: any one SELECT on the newest snapshot, and the named queries of `sql/queries`.

A console is a place where pasted SQL runs, so nothing but reading is possible: the file is read-only, only
statements that return rows are accepted, files and network are out of reach, the configuration is locked, memory and
time are bounded.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from dflop import resources
from dflop.errors import ConfigError, StoreError, did_you_mean
from dflop.store import snapshot

TIMEOUT_S = 60.0
HEADER_KEYS = ("purpose", "parameters", "grain", "units")

Params = Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True, slots=True)
class NamedQuery:
    """One file of `sql/queries`; everything but name and sql comes from its header comments."""

    name: str
    purpose: str
    parameters: str
    """`none`, or `$name type, meaning` per parameter."""
    grain: str
    units: str
    sql: str

    @property
    def parameter_names(self) -> list[str]:
        """Names a caller has to give values for."""
        return re.findall(r"\$(\w+)", self.parameters)


def query(
    store_root: Path | str, sql: str, params: Params | None = None, *, timeout_s: float = TIMEOUT_S
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Column names and rows of one SELECT (or DESCRIBE, SHOW, EXPLAIN) on the newest snapshot.

    Args:
        store_root: Folder of the store.
        sql: One statement.
        params: Values by name for `$name`, or in order for `?`.
        timeout_s: The query is interrupted after this time.

    Raises:
        StoreError: No snapshot, not exactly one reading statement, an SQL error, or out of time or memory.
    """
    con, seq = snapshot.open_current(store_root)
    timed_out = threading.Event()

    def stop() -> None:
        timed_out.set()
        con.interrupt()

    timer = threading.Timer(timeout_s, stop)
    timer.daemon = True
    try:
        statement = _only_reading_statement(con, sql)
        timer.start()
        cursor = con.execute(statement, params)
        rows = cursor.fetchall()
        return [column[0] for column in cursor.description], rows
    except duckdb.Error as error:
        if timed_out.is_set():
            raise StoreError(
                f"the query was stopped after {timeout_s:g} s", hint="narrow it with WHERE or LIMIT"
            ) from error
        raise StoreError("\n".join(_first_lines(error)), where=f"snapshot {seq} of {store_root}") from error
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()  # it may be inside interrupt(), which must not meet a closed connection
        con.close()


def list_queries(sql_root: Path | None = None) -> list[NamedQuery]:
    """The queries of `sql/queries`, by name.

    Raises:
        StoreError: A file lacks one of the header lines `-- purpose: ...`, parameters, grain, units.
    """
    folder = (sql_root or resources.path("sql")) / "queries"
    return [_parse(path) for path in sorted(folder.glob("*.sql"))]


def named_query(name: str, sql_root: Path | None = None) -> NamedQuery:
    """The query `sql/queries/<name>.sql`.

    Raises:
        ConfigError: There is no such query; the message lists those there are.
    """
    queries = {q.name: q for q in list_queries(sql_root)}
    if name not in queries:
        raise ConfigError(f"no query named `{name}`", hint=did_you_mean(name, queries))
    return queries[name]


def _only_reading_statement(con: duckdb.DuckDBPyConnection, sql: str) -> duckdb.Statement:
    statements = con.extract_statements(sql)
    if len(statements) != 1:
        raise StoreError(f"expected one SQL statement, got {len(statements)}", hint="run them one at a time")
    (statement,) = statements
    if statement.type not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
        raise StoreError(
            f"the store is read-only here: {statement.type.name} statements are refused",
            hint="use SELECT, DESCRIBE, SHOW or EXPLAIN; to add rows, let a job write the spool",
        )
    return statement


def _first_lines(error: duckdb.Error, limit: int = 4) -> list[str]:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[:limit]


def _parse(path: Path) -> NamedQuery:
    text = path.read_text(encoding="utf-8")
    header = dict(re.findall(r"^-- (\w+): (.+)$", text, flags=re.MULTILINE))
    missing = [key for key in HEADER_KEYS if key not in header]
    if missing:
        raise StoreError(
            f"query header lacks {', '.join(missing)}", where=str(path), hint="-- purpose: what it answers"
        )
    return NamedQuery(name=path.stem, sql=text, **{key: header[key] for key in HEADER_KEYS})
