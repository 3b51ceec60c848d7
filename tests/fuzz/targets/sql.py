"""The console of SQL: text, parameters, files of queries."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from dflop.report.rows import write_rows
from dflop.store import console
from tests.fuzz import hostile
from tests.fuzz.target import Target, attempt
from tests.fuzz.targets.store import make_store

_TIMEOUT_S = 2.0
_STATEMENTS = (
    "select * from correction", "select module, avg(factor) from correction group by all order by 1",
    "describe correction",
    "explain select 1", "show tables", "select * from v_run_summary where run_id = $run_id",
    "from correction select step",
    "with recursive t(n) as (select 1 union all select n + 1 from t where n < 10) select * from t",
    "pivot correction on module using sum(factor)",
    "select {'a': [1, 2], 'b': map {'k': 1.5}}, '2001-01-01'::date, interval 1 day, 1::hugeint, 'x'::blob, true",
)  # fmt: skip
_WORDS = (
    "; drop table correction", "read_csv('/etc/passwd')", "copy correction to '/tmp/x'", "attach '/tmp/x'",
    "install httpfs", "load httpfs",
    "pragma database_list", "set threads=99", "reset all", "insert into correction values (1)",
    "create table x(a int)", "delete from correction",
    "call pragma_version()", "enable_logging", "select * from range(1000000000000)", "repeat('a', 10000000000)",
    "getenv('HOME')", "export database 'x'",
    "'\\0'", "$1", "?", "$nope", "--", "/*", "select 1; select 2", "0::decimal(38,10)", "'9999-12-31'::date + 1",
    "make_timestamp(9223372036854775806)",
    "'infinity'::date", "nan", "1e999", "(select unnest(range(99999999)))", "union all", "list_transform([1], x -> x)",
    "⠀", "𝒳", "timestamptz '2001-01-01 00:00:00+99'",
    "(" * 2000, "select " + "1+" * 3000 + "1", "bit '101'", "uuid()", "array_value(1,2)", "struct_pack(a := 1)",
    "current_setting('memory_limit')",
)  # fmt: skip


@functools.cache
def _queries() -> tuple[str, ...]:
    return tuple(query.sql for query in console.list_queries())


def _texts() -> st.SearchStrategy[Any]:
    text = hostile.broken_text((*_STATEMENTS, *_queries()[::4]), _WORDS) | st.sampled_from(_WORDS)
    params = st.none() | st.dictionaries(
        st.sampled_from(("run_id", "nope", "")) | hostile.TEXTS, hostile.TEXTS, max_size=2
    )
    return st.tuples(text, params)


def _run(root: Path, folder: Path, sql: str, params: Any) -> None:
    """One statement, its rows in every form that the console writes."""
    form = ("table", "csv", "json", "parquet")[len(sql) % 4]
    with console.open_query(root, sql, params, timeout_s=_TIMEOUT_S) as result:
        if form == "parquet":
            result.write_parquet(folder / "out.parquet")
        else:
            write_rows(result.schema.names, result.rows(), form, folder / "out")


def _text(folder: Path) -> Callable[[Any], None]:
    root = make_store(folder / "store")
    before = sorted((p.name, p.stat().st_size) for p in root.rglob("*") if p.is_file())

    def check(example: tuple[str, Any]) -> None:
        attempt(_run, root, folder, *example)
        assert sorted((p.name, p.stat().st_size) for p in root.rglob("*") if p.is_file()) == before, "the store changed"

    return check


def _params(folder: Path) -> Callable[[Any], None]:
    root = make_store(folder / "store")

    def check(example: tuple[int, dict[str, str]]) -> None:
        number, texts = example
        queries = console.list_queries()
        query = queries[number % len(queries)]
        given = dict(zip(query.parameter_names, texts.values(), strict=False)) | ({} if query.parameters else texts)
        values = attempt(query.values, given)
        if values is not None:
            attempt(_run, root, folder, query.sql, values or None)

    return check


def _files(folder: Path) -> Callable[[Any], None]:
    queries = folder / "queries"
    queries.mkdir()

    def check(text: str) -> None:
        (queries / "mine.sql").write_bytes(text.encode("utf-8", "surrogatepass"))
        found = attempt(console.list_queries, folder)
        for query in found or ():
            attempt(query.values, dict.fromkeys(query.parameter_names, "1"))
            json.dumps([query.name, query.purpose])

    return check


TARGETS = (
    Target("sql", "statements cut up, with what a console must refuse; parameters", _texts, _text, deadline_s=30),
    Target(
        "sql-parameters",
        "values of the parameters of named queries",
        lambda: st.tuples(
            st.integers(0, 200),
            st.dictionaries(st.sampled_from("abcd"), hostile.TEXTS | hostile.SCALARS.map(str), max_size=4),
        ),
        _params,
        deadline_s=30,
    ),
    Target(
        "sql-file",
        "files of named queries",
        lambda: hostile.broken_text(_queries()[:6], ("-- parameters: $a bigint, x; ", "$a nope, y")),
        _files,
    ),
)
