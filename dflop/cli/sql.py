"""`dflop sql`: ask the store."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from dflop import units
from dflop.cli.common import DEFAULT_STORE, Json, Quiet, Store, at_least, form_of
from dflop.errors import ConfigError
from dflop.run.messages import say

if TYPE_CHECKING:
    from dflop.store.console import Result

_OPTION = re.compile(r"--[a-z][a-z-]*=")


def sql(
    query: Annotated[
        str, Parameter(help="SQL text, the name of a query that --list shows, a file ending in .sql, or - for stdin.")
    ] = "",
    *,
    store: Store = DEFAULT_STORE,
    param: Annotated[
        tuple[str, ...],
        Parameter(help="name=value for a query with parameters; repeatable. run_id=latest is the run that began last."),
    ] = (),
    form: Annotated[
        Literal["table", "csv", "json", "parquet"], Parameter(name="--format", help="Output format.")
    ] = "table",
    as_json: Json = False,
    output: Annotated[Path | None, Parameter(help="File to write instead of stdout.")] = None,
    timeout_s: Annotated[
        float, Parameter(help="Time limit of the query, its output included.", validator=at_least(0.001))
    ] = 60.0,
    list_queries: Annotated[bool, Parameter(name="--list", help="List the named queries.")] = False,
    show: Annotated[bool, Parameter(help="Print the SQL of a named query instead of running it.")] = False,
    quiet: Quiet = False,
) -> None:
    """Query the store, read-only: a SELECT, or the name of a query in sql/queries.

    Example: dflop sql --list; dflop sql tables; dflop sql "select * from v_run_summary" --json; dflop sql < query.sql
    """
    from dflop.report.rows import print_rows
    from dflop.store import console

    shape = form_of(form, as_json)
    if list_queries:
        rows = [(q.name, q.purpose, " ".join(q.parameter_names)) for q in console.list_queries()]
        print_rows(("name", "purpose", "parameters"), rows, "json" if shape == "json" else "table")
        return
    query = _read(query)
    if not query.strip():
        raise ConfigError("no query", hint="give SQL text, a file or a name: `dflop sql --list`, `dflop sql tables`")
    named = None if any(c.isspace() for c in query.strip()) else console.named_query(query)
    text = named.sql if named else query
    if show:
        print(text, end="")
        return
    console.bound_process(timeout_s)
    given = _pairs(param)
    if given.get("run_id") == "latest":
        given["run_id"] = console.latest_run(store)
    values: dict[str, Any] = dict(named.values(given)) if named else dict(given)
    if shape == "parquet" and output is None:
        raise ConfigError("Parquet needs a file", hint="--output FILE")
    with console.open_query(store, text, values or None, timeout_s=timeout_s) as result:
        num_rows = _write(result, shape, output)
    if quiet:
        return
    if output:
        say(f"{num_rows} rows of snapshot {result.snapshot.seq} written to {output}")
    elif sys.stderr.isatty():
        age_s = time.time() - result.snapshot.published_at_s
        say(f"snapshot {result.snapshot.seq}, {units.seconds(age_s)} old")


def as_text(word: str) -> str:
    """A word of the command line; with a blank in front where it begins like an option and is none: SQL, or stdin."""
    is_comment = word.startswith("--") and any(c.isspace() for c in word) and not _OPTION.match(word)
    return f" {word}" if is_comment or word == "-" else word


def _read(query: str) -> str:
    """The text itself, or that of the file or of stdin."""
    if query.strip() == "-" or (not query and sys.stdin is not None and not sys.stdin.isatty()):
        return sys.stdin.read()
    if not query.strip().endswith(".sql"):
        return query
    try:
        return Path(query.strip()).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot read the query: {reason}", where=query.strip()) from None


def _write(result: Result, form: str, output: Path | None) -> int:
    from dflop.report.rows import print_rows

    try:
        if form == "parquet" and output:
            return result.write_parquet(output)
        return print_rows(result.schema.names, result.rows(), form, output)
    except BrokenPipeError:
        raise  # the reader has seen enough: no error
    except OSError as error:
        raise ConfigError(
            f"cannot write the result: {error.strerror}", where=str(output or "stdout"), hint="choose another --output"
        ) from error


def _pairs(texts: Sequence[str]) -> dict[str, str]:
    for text in texts:
        if text.find("=") < 1:
            raise ConfigError(f"cannot read `--param {text}`", hint="write it as --param name=value")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}
