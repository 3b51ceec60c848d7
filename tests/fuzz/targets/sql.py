"""The console of SQL: text, parameters, files of queries."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from dflop.report.rows import write_rows
from dflop.store import console
from tests.fuzz import hostile
from tests.fuzz.target import Strategy, Target, attempt
from tests.fuzz.targets.store import make_store

_TIMEOUT_S = 2.0
_STATEMENTS = (
    "select * from correction", "select module, avg(factor) from correction group by all order by 1",
    "describe correction", "explain select 1", "show tables", "select * from v_run_summary where run_id = $run_id",
    "from correction select step", "pivot correction on module using sum(factor)",
    "with recursive t(n) as (select 1 union all select n + 1 from t where n < 10) select * from t",
    "select {'a': [1, 2], 'b': map {'k': 1.5}}, '2001-01-01'::date, interval 1 day, 1::hugeint, 'x'::blob, true",
)  # fmt: skip
_WORDS = (
    "; drop table correction", "read_csv('/etc/passwd')", "copy correction to '/tmp/x'", "attach '/tmp/x'", "?", "--",
    "install httpfs", "load httpfs", "pragma database_list", "set threads=99", "reset all", "create table x(a int)",
    "insert into correction values (1)", "delete from correction", "call pragma_version()", "enable_logging",
    "select * from range(1000000000000)", "repeat('a', 10000000000)", "getenv('HOME')", "export database 'x'", "'\\0'",
    "$1", "$nope", "/*", "select 1; select 2", "0::decimal(38,10)", "'9999-12-31'::date + 1", "union all", "nan",
    "make_timestamp(9223372036854775806)", "'infinity'::date", "1e999", "(select unnest(range(99999999)))", "⠀", "𝒳",
    "list_transform([1], x -> x)", "timestamptz '2001-01-01 00:00:00+99'", "(" * 2000, "select " + "1+" * 3000 + "1",
    "bit '101'", "uuid()", "array_value(1,2)", "struct_pack(a := 1)", "current_setting('memory_limit')",
)  # fmt: skip


@functools.cache
def _queries() -> tuple[console.NamedQuery, ...]:
    return tuple(console.list_queries())


def _prepare(folder: Path) -> Path:
    make_store(folder / "store")
    (folder / "queries").mkdir()
    return folder


def _texts() -> Strategy:
    text = hostile.broken_text((*_STATEMENTS, *(query.sql for query in _queries()[::4])), _WORDS)
    names = st.sampled_from(("run_id", "nope", "")) | hostile.TEXTS
    params = st.none() | st.dictionaries(names, hostile.TEXTS, max_size=2)
    return st.tuples(text | st.sampled_from(_WORDS), params)


def _run(folder: Path, sql: str, params: Any) -> None:
    """One statement, its rows in every form that the console writes."""
    form = ("table", "csv", "json", "parquet")[len(sql) % 4]
    with console.open_query(folder / "store", sql, params, timeout_s=_TIMEOUT_S) as result:
        if form == "parquet":
            result.write_parquet(folder / "out.parquet")
        else:
            write_rows(result.schema.names, result.rows(), form, folder / "out")


def _files(root: Path) -> list[tuple[str, int]]:
    return sorted((path.name, path.stat().st_size) for path in root.rglob("*") if path.is_file())


def _text(folder: Path, example: tuple[str, Any]) -> None:
    before = _files(folder / "store")
    attempt(_run, folder, *example)
    assert _files(folder / "store") == before, "the store changed"


def _parameters() -> Strategy:
    texts = st.dictionaries(st.sampled_from("abcd"), hostile.TEXTS | hostile.SCALARS.map(str), max_size=4)
    return st.tuples(st.integers(0, 200), texts)


def _values(folder: Path, example: tuple[int, dict[str, str]]) -> None:
    number, texts = example
    query = _queries()[number % len(_queries())]
    given = dict(zip(query.parameter_names, texts.values(), strict=False)) | ({} if query.parameters else texts)
    values = attempt(query.values, given)
    if values is not None:
        attempt(_run, folder, query.sql, values or None)


def _query_files() -> Strategy:
    return hostile.broken_text([query.sql for query in _queries()[:6]], ("-- parameters: $a bigint, x; ", "$a nope, y"))


def _file(folder: Path, example: str) -> None:
    (folder / "queries" / "mine.sql").write_bytes(example.encode("utf-8", "surrogatepass"))
    for query in attempt(console.list_queries, folder) or ():
        attempt(query.values, dict.fromkeys(query.parameter_names, "1"))
        json.dumps([query.name, query.purpose])


_TEXTS = "statements cut up, with what a console must refuse; parameters"
_VALUES = "values of the parameters of named queries"
TARGETS = (
    Target("sql", _TEXTS, _texts, _text, _prepare, deadline_s=30),
    Target("sql-parameters", _VALUES, _parameters, _values, _prepare, deadline_s=30),
    Target("sql-file", "files of named queries", _query_files, _file, _prepare),
)
