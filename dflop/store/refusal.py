"""What the console does not do, and how it says so: one error with what happened, where, and what to do instead."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

from dflop.errors import StoreError
from dflop.store import snapshot
from dflop.store.snapshot import Current

READING = "use SELECT, DESCRIBE, SHOW or EXPLAIN; to add rows, write them to the spool from a job"
NOTHING_ELSE = "the console reads this store and nothing else: no files, network, extensions or settings"
_READ_ONLY = "the store is read-only here"

# duckdb 1.5 lets a SELECT switch these in spite of the locked configuration, and a log file that it may not write
# then ends the process, with every other connection in it.
_SWITCH = re.compile(r"\b(?:enable|disable)_(?:logging|profiling)\b", re.IGNORECASE)


def reading_statement(con: duckdb.DuckDBPyConnection, sql: str) -> duckdb.Statement:
    """The one statement of a text, if it only reads.

    Raises:
        StoreError: There are none or several, or it may do more than read.
        duckdb.Error: It cannot be parsed.
    """
    _check_unicode(sql, "the statement")
    if switch := _SWITCH.search(sql):
        raise StoreError(f"{_READ_ONLY}: {switch[0]} is refused", hint=NOTHING_ELSE)
    statements = con.extract_statements(sql)
    kinds = [_kind(statement) for statement in statements]
    if re.match(r"\s*pivot\b", sql, re.IGNORECASE) and kinds != ["SELECT"]:
        # It would first create an enum of the values it finds.
        hint = "list the values: PIVOT t ON module IN ('llm', 'vision') USING sum(x)"
        raise StoreError(f"{_READ_ONLY}: PIVOT without a list of values is refused", hint=hint)
    if len(statements) != 1:
        raise StoreError(f"expected one SQL statement, got {len(statements)}", hint="run them one at a time")
    if kinds[0] not in ("SELECT", "EXPLAIN"):
        raise StoreError(f"{_READ_ONLY}: {kinds[0]} statements are refused", hint=READING)
    return statements[0]


def check_parameters(params: Mapping[str, Any] | Sequence[Any] | None) -> None:
    """Refuses names and texts that the database cannot hold, and would not say which."""
    named = params.items() if isinstance(params, Mapping) else enumerate(params or (), 1)
    for name, value in named:
        _check_unicode(str(name), f"the name of parameter {name!a}")
        if isinstance(value, str):
            _check_unicode(value, f"the value of parameter {name}")


def _check_unicode(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes of a command line that are no UTF-8
        raise StoreError(f"{what} is not valid Unicode, at character {error.start}") from None


def explained(error: Exception, con: duckdb.DuckDBPyConnection, current: Current, store_root: Path | str) -> StoreError:
    """An error of the database, as one of ours that says what can be done about it."""
    lines = [line for line in str(error).splitlines() if line.strip()][:4]
    text, hint = "\n".join(lines).removeprefix("Query execution failed: "), ""
    if "Catalog Error" in text:
        hint = snapshot.lag(con) or "`dflop sql tables` lists tables and views"
    elif "Binder Error: Referenced column" in text:
        hint = snapshot.lag(con) or "`dflop sql columns --param relation=NAME` lists the columns of a table or view"
    elif "Permission Error" in text or "disabled" in text or "configuration has been locked" in text:
        hint = NOTHING_ELSE
    elif "in read-only mode" in text or "Expected a single SELECT" in text:
        hint = f"{_READ_ONLY}: {READING}"
    elif "Out of Memory" in text or isinstance(error, MemoryError):
        text = lines[0] if lines else "Out of Memory"  # what follows advises settings that are locked here
        hint = f"a query may use {snapshot.READ_CONFIG['memory_limit']}: aggregate, or narrow it with WHERE or LIMIT"
    return StoreError(text, where=f"snapshot {current.seq} of {store_root}", hint=hint)


def _kind(statement: duckdb.Statement) -> str:
    try:
        return statement.type.name
    except ValueError:  # duckdb 2.0 parses kinds of statements that its Python enum lacks
        return "these"
