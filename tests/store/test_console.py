from __future__ import annotations

import re
from pathlib import Path

import pytest

from dflop.errors import ConfigError, StoreError
from dflop.store import console, snapshot
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.spool import SpoolWriter


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, make) -> Path:
    root = tmp_path_factory.mktemp("store")
    with SpoolWriter(root, "run", "p") as writer:
        writer.append(make.correction(1, factor=1.5))
    ingest(root)
    return root


def test_a_select_returns_columns_and_rows(store: Path) -> None:
    assert console.query(store, "select module, factor from correction") == (["module", "factor"], [("llm", 1.5)])


def test_parameters_go_by_name_or_position(store: Path) -> None:
    assert console.query(store, "select $a + 1 as b", {"a": 1})[1] == [(2,)]
    assert console.query(store, "select ? || 'x'", ["a"])[1] == [("ax",)]


@pytest.mark.parametrize(
    "sql",
    [
        "describe correction",
        "show tables",
        "explain select 1",
        "from correction",
        "with a as (select 1) from a",
    ],
)
def test_ways_of_reading_are_accepted(store: Path, sql: str) -> None:
    assert console.query(store, sql)[1]


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_csv('/etc/passwd')",
        "select * from read_text('/etc/passwd')",
        "select * from read_blob('/etc/passwd')",
        "select * from read_parquet('spool/**/*.parquet')",
        "select * from sniff_csv('/etc/passwd')",
        "select * from glob('/etc/*')",
        "select * from '/etc/passwd'",
        "from read_json('http://localhost/x')",
        "copy correction to '/tmp/x.csv'",
        "copy correction from '/etc/passwd'",
        "export database '/tmp/x'",
        "import database '/tmp/x'",
        "attach ':memory:' as other",
        "attach '/tmp/other.duckdb' as other",
        "detach other",
        "install httpfs",
        "load httpfs",
        "set threads = 64",
        "set memory_limit = '1TB'",
        "set enable_external_access = true",
        "reset memory_limit",
        "set variable a = 1",
        "create table t (a int)",
        "create temp table t as select 1",
        "create macro m() as 1",
        "create secret s (type s3)",
        "insert into correction select * from correction",
        "update correction set factor = 0",
        "delete from correction",
        "drop table correction",
        "alter table correction add column x int",
        "checkpoint",
        "vacuum",
        "prepare p as select 1",
        "call pragma_version()",
        "begin",
        "select 1; drop table correction",
        "select 1; select 2",
        "",
    ],
)
def test_everything_but_reading_the_snapshot_is_refused(store: Path, sql: str) -> None:
    with pytest.raises(StoreError):
        console.query(store, sql)
    assert console.query(store, "select count(*) from correction")[1] == [(1,)]


def test_python_variables_are_out_of_reach(store: Path) -> None:
    secret = __import__("pyarrow").table({"a": [1]})
    with pytest.raises(StoreError, match="secret"):
        console.query(store, "select * from secret")
    assert secret.num_rows == 1


def test_a_wrong_query_shows_where(store: Path) -> None:
    with pytest.raises(StoreError, match=r"(?s)Binder Error.*facto.*LINE 1"):
        console.query(store, "select facto from correction")


def test_a_query_without_its_parameter_names_it(store: Path) -> None:
    with pytest.raises(StoreError, match="run_id"):
        console.query(store, console.named_query("slowest_steps").sql)


def test_an_endless_query_is_stopped(store: Path) -> None:
    with pytest.raises(StoreError, match=r"stopped after 0\.1 s"):
        console.query(store, "select count(*) from range(1000000000000) as a, range(1000) as b", timeout_s=0.1)


def test_memory_is_bounded(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(snapshot.READ_CONFIG, "memory_limit", "64MiB")
    with pytest.raises(StoreError, match="Out of Memory"):
        console.query(store, "select list(a) from range(2000000000) as r(a)")


def test_a_console_and_a_reader_share_a_process(store: Path) -> None:
    with Reader(store) as reader:
        assert console.query(store, "select 1")[1] == [(1,)]
        assert reader.seq == 1


@pytest.mark.parametrize("name", [q.name for q in console.list_queries()])
def test_named_queries_have_true_headers_and_run(store: Path, name: str) -> None:
    query = console.named_query(name)
    assert query.parameter_names == list(dict.fromkeys(re.findall(r"\$(\w+)", query.sql.partition("-- grain")[2])))
    columns, _ = console.query(store, query.sql, dict.fromkeys(query.parameter_names, "run"))
    assert columns


def test_an_unknown_query_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        console.named_query("run")
    assert "did you mean `runs`?" in str(caught.value)


def test_a_query_without_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "queries").mkdir()
    (tmp_path / "queries/bare.sql").write_text("-- purpose: nothing\nselect 1;")
    with pytest.raises(StoreError, match="lacks parameters, grain, units"):
        console.list_queries(tmp_path)
