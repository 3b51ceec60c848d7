"""SQL for people: any one SELECT on the newest snapshot, and the named queries of `sql/queries`.

A console is a place where pasted SQL runs, so nothing but reading is possible: the file is read-only, only
statements that return rows are accepted, files and network are out of reach, the configuration is locked, memory and
time are bounded (`bound_process` makes that hard for a separate process). Results are streamed in Arrow batches: a
million rows need no gigabytes. A person who owns the process can always open the file without it, so paths of the
store, which that person gave, are not hidden.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from dflop import files, resources
from dflop.errors import ConfigError, StoreError, did_you_mean
from dflop.store import snapshot
from dflop.store.snapshot import Current

TIMEOUT_S = 60.0
BATCH_ROWS = 20_000
BOOLEANS = {"true": True, "false": False}
TYPES: dict[str, Callable[[str], Any]] = {
    "varchar": str, "bigint": int, "double": float, "boolean": lambda text: BOOLEANS[text.lower()],
}  # fmt: skip
PROCESS_BYTES = 6 * 2**30
"""What the process may allocate: the memory limit of a query, and 2 GiB for Python, Arrow and thread stacks."""
OVERTIME_S = 5.0
"""An interrupted query has so long to end by itself."""
TOO_LONG = "narrow it with WHERE or LIMIT, or raise --timeout-s"
# Arrow's reader wraps what DuckDB raises.
READ_ERRORS = (duckdb.Error, OSError, pa.ArrowException, MemoryError)

Params = Mapping[str, Any] | Sequence[Any]
READING = "use SELECT, DESCRIBE, SHOW or EXPLAIN; to add rows, write them to the spool from a job"
NOTHING_ELSE = "the console reads this store and nothing else: no files, network, extensions or settings"
_READ_ONLY = "the store is read-only here"
# duckdb 1.5 lets a SELECT switch these in spite of the locked configuration, and a log file that it may not write
# then ends the process, with every other connection in it.
_SWITCH = re.compile(r"\b(?:enable|disable)_(?:logging|profiling)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a named query."""

    name: str
    type: str
    meaning: str


@dataclass(frozen=True, slots=True)
class NamedQuery:
    """One file of `sql/queries`; its header comments say the rest, what a row is and in which units included."""

    name: str
    purpose: str
    parameters: tuple[Parameter, ...]
    sql: str

    @property
    def parameter_names(self) -> list[str]:
        return [p.name for p in self.parameters]

    def values(self, given: Mapping[str, str]) -> dict[str, Any]:
        """Parameter values out of text, of the types the header names.

        Raises:
            ConfigError: One is missing, unknown or of another type; the message lists all with their meaning.
        """
        wanted = "; ".join(f"--param {p.name}=... ({p.type}, {p.meaning})" for p in self.parameters) or "no parameters"
        unknown, missing = set(given) - set(self.parameter_names), set(self.parameter_names) - set(given)
        for problem, names in (("has no parameter", unknown), ("needs parameter", missing)):
            if names:
                listed = ", ".join(f"`{name}`" for name in sorted(names))
                raise ConfigError(f"query `{self.name}` {problem} {listed}", hint=f"it has {wanted}")
        return {p.name: _typed(p, given[p.name]) for p in self.parameters}


@dataclass(frozen=True, slots=True)
class Result:
    """An open result; read it, once, before the block ends."""

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]
    snapshot: Current

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Rows as Python values.

        Raises:
            StoreError: Python has no such value: a date after the year 9999, say.
        """
        for batch in self.batches:
            try:
                columns = [column.to_pylist() for column in batch.columns]
            except (OverflowError, ValueError) as error:
                hint = "cast its column, as in started_at::varchar, or write --format parquet"
                raise StoreError(f"a value of the result cannot be shown: {error}", hint=hint) from error
            yield from zip(*columns, strict=True)

    def write_parquet(self, path: Path) -> int:
        """Writes the rows into a file that appears when it is complete; returns how many there were.

        Raises:
            StoreError: Parquet has no such type.
            OSError: The file cannot be written.
        """
        num_rows = 0
        with files.written(path) as place:
            try:
                with open(place, "wb") as file, pq.ParquetWriter(file, self.schema, compression="zstd") as writer:
                    for batch in self.batches:
                        writer.write_batch(batch)
                        num_rows += batch.num_rows
            except pa.ArrowException as error:
                hint = "cast the column, as in x::varchar"
                raise StoreError(f"Parquet cannot hold it: {error}", hint=hint) from error
        return num_rows


@contextlib.contextmanager
def open_query(
    store_root: Path | str, sql: str, params: Params | None = None, *, timeout_s: float = TIMEOUT_S
) -> Iterator[Result]:
    """Runs one SELECT (or DESCRIBE, SHOW, EXPLAIN) on the newest snapshot; the rows are computed as they are read.

    The query, reading included, is interrupted after `timeout_s`. Parameters are by name for `$name`, in order for `?`.

    Raises:
        StoreError: No snapshot, not exactly one reading statement, no valid Unicode, an SQL error, or out of time or
            memory; also from inside the block, while batches are read.
    """
    con, current = snapshot.open_current(store_root)
    timed_out = threading.Event()

    def stop() -> None:
        timed_out.set()
        con.interrupt()

    timer = threading.Timer(timeout_s, stop)
    timer.daemon = True

    def explain(error: Exception) -> StoreError:
        if timed_out.is_set():
            return StoreError(f"the query was stopped after {timeout_s:g} s", hint=TOO_LONG)
        return explained(error, con, current, store_root)

    try:
        try:
            statement = reading_statement(con, sql)
            check_parameters(params)
            timer.start()
            reader = snapshot.run(con, statement, params).to_arrow_reader(BATCH_ROWS)
        except READ_ERRORS as error:
            raise explain(error) from error
        yield Result(reader.schema, _batches(reader, explain), current)
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()  # it may be inside interrupt(), which must not meet a closed connection
        con.close()


def query(
    store_root: Path | str, sql: str, params: Params | None = None, *, timeout_s: float = TIMEOUT_S
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Column names and all rows, as Python values, of one statement; see `open_query`."""
    with open_query(store_root, sql, params, timeout_s=timeout_s) as result:
        return result.schema.names, list(result.rows())


def latest_run(store_root: Path | str) -> str:
    """The run that began last, of those that trained.

    Raises:
        StoreError: none has, or there is no store.
    """
    _, rows = query(store_root, "select run_id from v_run semi join v_step using (run_id) order by started_at desc")
    if not rows:
        raise StoreError("no run in the store has trained a step", where=str(store_root), hint="dflop runs list")
    return str(rows[0][0])


def bound_process(timeout_s: float) -> None:
    """Bounds memory and life of this process; for a command that runs one query, which has `timeout_s`, and ends.

    DuckDB's own bounds are soft: `memory_limit` does not count what one function makes of one row
    (`list_sort(range(300000000))` took 18 GiB under a limit of 4), and an interrupt waits until that function returns
    (79 s instead of 3). `OVERTIME_S` later the process says so and ends with the exit code of a StoreError, without
    cleaning up: a `.tmp-` file may stay next to the output.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    least = min(n for n in (soft, hard, PROCESS_BYTES) if n != resource.RLIM_INFINITY)
    with contextlib.suppress(ValueError, OSError):  # a system without this limit
        resource.setrlimit(resource.RLIMIT_DATA, (least, hard))
    watchdog = threading.Timer(timeout_s + OVERTIME_S, _end, (timeout_s,))
    watchdog.daemon = True
    watchdog.start()


def list_queries(sql_root: Path | None = None) -> list[NamedQuery]:
    """The queries of `sql/queries`, by name."""
    folder = (sql_root or resources.path("sql")) / "queries"
    return [_parse(path) for path in sorted(folder.glob("*.sql"))]


def named_query(name: str) -> NamedQuery:
    """The query `sql/queries/<name>.sql`.

    Raises:
        ConfigError: There is no such query; the message lists those there are.
    """
    queries = {q.name: q for q in list_queries()}
    if name not in queries:
        raise ConfigError(f"no query named `{name}`", hint=did_you_mean(name, queries))
    return queries[name]


def _batches(reader: pa.RecordBatchReader, explain: Callable[[Exception], StoreError]) -> Iterator[pa.RecordBatch]:
    # Only errors of reading are the query's: a full disk or a closed pipe of whoever writes the rows is not.
    try:
        yield from reader
    except READ_ERRORS as error:
        raise explain(error) from error


def _parse(path: Path) -> NamedQuery:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise StoreError(f"not UTF-8 text: {error.reason} at byte {error.start}", where=str(path)) from None
    header = dict(re.findall(r"^-- (\w+): (.+)$", text, flags=re.MULTILINE))
    if missing := ", ".join(key for key in ("purpose", "parameters", "grain", "units") if key not in header):
        raise StoreError(f"query header lacks {missing}", where=str(path), hint="-- purpose: what it answers")
    found = header["parameters"]
    parameters = () if found == "none" else tuple(_parameter(part, path) for part in found.split("; "))
    return NamedQuery(path.stem, header["purpose"], parameters, text)


def _parameter(text: str, path: Path) -> Parameter:
    match = re.fullmatch(r"\$(\w+) (\w+), (.+)", text)
    if not match or match[2] not in TYPES:
        hint = f"write `$name type, meaning; ...` with a type out of {', '.join(TYPES)}"
        raise StoreError(f"cannot read parameter `{text}` of a query header", where=str(path), hint=hint)
    return Parameter(*match.groups())


def _typed(parameter: Parameter, text: str) -> Any:
    try:
        return TYPES[parameter.type](text)
    except (ValueError, KeyError):
        problem, where = f"`{text}` is no {parameter.type}", f"--param {parameter.name}"
        raise ConfigError(problem, where=where, hint=parameter.meaning) from None


def _end(timeout_s: float) -> None:
    error = StoreError(f"the query was stopped after {timeout_s:g} s and did not end by itself", hint=TOO_LONG)
    print(f"dflop: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)


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
