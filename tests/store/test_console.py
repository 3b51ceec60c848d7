import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflop.errors import ConfigError, StoreError
from dflop.records import ExpertLoad, GradNorm, SourceLoss
from dflop.store import console
from tests.store.asking import fill


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, make) -> Path:
    return fill(tmp_path_factory.mktemp("store"), make.correction(1, factor=1.5))


def test_ways_of_reading_are_accepted(store: Path) -> None:
    assert console.query(store, "select module, factor from correction") == (["module", "factor"], [("llm", 1.5)])
    assert console.query(store, "select $a + 1 as b", {"a": 1})[1] == [(2,)]
    assert console.query(store, "select ? || 'x'", ["a"])[1] == [("ax",)]
    pivot = "pivot (select module, factor from correction) on module in ('llm') using max(factor)"
    assert console.query(store, pivot) == (["llm"], [(1.5,)])
    for sql in (
        "describe correction", "show tables", "explain select 1", "from correction", "with a as (select 1) from a",
    ):  # fmt: skip
        assert console.query(store, sql)[1], sql


def refusal_of(store: Path, sql: str) -> str:
    """What the error says; nothing where the query ran."""
    try:
        console.query(store, sql)
    except StoreError as error:
        return str(error)
    return ""


REFUSED = (
    "select * from read_text('/etc/passwd')", "select * from read_parquet('spool/**/*.parquet')",
    "select * from glob('/etc/*')", "select * from '/etc/passwd'", "from read_json('http://localhost/x')",
    "copy correction to 'x.csv'", "copy correction from '/etc/passwd'",
    "select * from query('select * from read_text(''/etc/passwd'')')", "from query_table('/etc/passwd')",
    "select getenv('HOME')", "pragma enable_profiling", "reset lock_configuration",
    "explain analyze insert into correction select * from correction",
    "with gone as (delete from correction returning *) from gone", "comment on table correction is 'mine'",
    "truncate correction", "execute p", "use memory", "from duckdb_secrets(redact=false)",
    "/* harmless */ drop table correction --", "select 1 -- \n; drop table correction", "export database 'x'",
    "import database '/tmp/x'", "attach 'other.duckdb' as other", "install httpfs", "set threads = 64",
    "set enable_external_access = true", "set variable a = 1", "create table t (a int)", "create table t as select 1",
    "create secret s (type s3)", "insert into correction select * from correction", "update correction set factor = 0",
    "delete from correction", "drop table correction", "alter table correction add column x int", "checkpoint",
    "vacuum", "prepare p as select 1", "call pragma_version()", "begin", "select 1; delete from correction",
    "from enable_logging(storage='file', storage_path='/tmp/x')", "from query('from ENABLE_LOGGING()')",
    "from enable_profiling(format='json', save_location='/tmp/x.json')", "update extensions", "connect 'x'",
    "pivot correction on module using max(factor)", "from query('drop table correction')",
    "from json_execute_serialized_sql(json_serialize_sql('from read_text(''/etc/passwd'')'))",
    "merge into correction using correction as c on true when matched then delete", "copy from database a to b",
    "from read_duckdb('/etc/passwd')", "select * from correction limit (select count(*) from read_text('/etc/passwd'))",
    ";", "",
)  # fmt: skip


def test_everything_but_reading_the_snapshot_is_refused_and_changes_nothing(store: Path) -> None:
    path, secret = store / "current.duckdb", pa.table({"a": [1]})
    before, entries = path.read_bytes(), sorted(store.rglob("*"))
    said = {sql: refusal_of(store, sql) for sql in (*REFUSED, "from secret")}
    assert {sql: text for sql, text in said.items() if not text or "Traceback" in text} == {}
    assert secret.num_rows == 1, "a variable of this process, which DuckDB would find"
    assert path.read_bytes() == before
    assert sorted(store.rglob("*")) == entries


def test_rows_are_streamed_and_not_collected(store: Path) -> None:
    with console.open_query(store, "select * from range(100000000000) as r(a)") as result:
        first = next(result.batches)
    assert first.num_rows <= console.BATCH_ROWS


def test_a_result_becomes_a_parquet_file_or_none(store: Path, tmp_path: Path) -> None:
    with console.open_query(store, "select a, [a, a] as pair from range(50000) as r(a)") as result:
        assert result.write_parquet(tmp_path / "rows.parquet") == 50_000
    table = pq.read_table(tmp_path / "rows.parquet")
    assert (table.num_rows, table["pair"][7].as_py()) == (50_000, [7, 7])
    bad = "select case when a = 49999 then error('late') else a end as a from range(50000) as r(a)"
    with pytest.raises(StoreError, match="late"), console.open_query(store, bad) as result:
        result.write_parquet(tmp_path / "bad.parquet")
    assert [p.name for p in tmp_path.iterdir()] == ["rows.parquet"]


def test_parameters_of_named_queries_are_typed_and_complete() -> None:
    given = [("n", "bigint", "how many"), ("x", "varchar", "what")]
    query = console.NamedQuery("q", "p", tuple(console.Parameter(*p) for p in given), "")
    assert query.values({"n": "7", "x": "7"}) == {"n": 7, "x": "7"}
    with pytest.raises(ConfigError, match="needs parameter `n`, `x`") as error:
        query.values({})
    assert "--param n=... (bigint, how many)" in error.value.hint
    with pytest.raises(ConfigError, match="has no parameter `y`"):
        query.values({"n": "7", "x": "", "y": ""})
    with pytest.raises(ConfigError, match="`seven` is no bigint"):
        query.values({"n": "seven", "x": ""})


def test_what_the_writer_of_rows_meets_is_not_blamed_on_the_query(store: Path) -> None:
    with pytest.raises(BrokenPipeError), console.open_query(store, "select 1"):
        raise BrokenPipeError


def test_an_endless_query_is_stopped(store: Path) -> None:
    for sql in (
        "select count(*) from range(1000000000000) as a, range(1000) as b",
        "with recursive r as (select 1 as a union all select a + 1 from r) from r",
    ):
        with pytest.raises(StoreError, match=r"stopped after 0\.1 s"):
            console.query(store, sql, timeout_s=0.1)


def test_named_queries_have_true_headers_and_run(store: Path) -> None:
    queries = console.list_queries()
    assert len(queries) >= 12
    for query in queries:
        used = dict.fromkeys(re.findall(r"\$(\w+)", query.sql.partition("-- grain")[2]))
        assert query.parameter_names == list(used), query.name
        given = {p.name: "run" if p.type == "varchar" else "1" for p in query.parameters}
        assert console.query(store, query.sql, query.values(given))[0]


def test_expert_load_has_the_fullest_rank_and_the_most_used_expert(tmp_path: Path) -> None:
    """Ranks of the last attempt: 10, 0, 2, 4 and 2, 0, 2, 4 tokens of layer 3 make 12, 0, 4, 8 for four experts."""
    of = {(0, 0): (90, 0, 0, 0), (1, 0): (10, 0, 2, 4), (1, 1): (2, 0, 2, 4)}
    rows = [ExpertLoad("run", attempt, 20, rank, 0, rank, 20, 3, n) for (attempt, rank), n in of.items()]
    store = fill(tmp_path, *rows)
    query = console.named_query("expert_load")
    columns, found = console.query(store, query.sql, {"run_id": "run", "ep": 2})
    assert columns[0] == "layer"
    assert found == [(3, 4, 24, 0, 2.0, 1.0)]
    assert console.query(store, query.sql, {"run_id": "run", "ep": 4})[1][0][-1] == 2.0


def test_validation_is_the_mean_over_tokens_of_all_sources(tmp_path: Path) -> None:
    def loss(source: str, value: float, num_tokens: int, attempt: int = 1, split: str = "validation") -> SourceLoss:
        return SourceLoss("run", attempt, 9, split, source, value, num_tokens, 2, 1e9)

    rows = loss("a", 1.0, 30), loss("b", 2.0, 10), loss("a", 9.0, 90, attempt=0), loss("a", 9.0, 90, split="train")
    query = console.named_query("validation")
    found = console.query(fill(tmp_path, *rows), query.sql, {"run_id": "run"})[1]
    assert found == [(9, None, 1.25, 40, 4), (9, "a", 1.0, 30, 2), (9, "b", 2.0, 10, 2)]


def test_source_losses_takes_steps_together(tmp_path: Path) -> None:
    rows = [SourceLoss("run", 0, step, "train", s, step + 1.0, 10, 2, 1e9) for step in range(4) for s in ("a", "b")]
    query = console.named_query("source_losses")
    found = console.query(fill(tmp_path, *rows[:-1]), query.sql, {"run_id": "run", "every": 2})[1]
    assert found == [("a", 0, 1.5, 20, 4), ("a", 2, 3.5, 20, 4), ("b", 0, 1.5, 20, 4), ("b", 2, 3.0, 10, 2)]


def test_the_loss_of_routers_is_a_mean_over_steps(tmp_path: Path) -> None:
    steps = {(0, 0): 2.0, (1, 0): 9.0, (1, 1): 1.0, (2, 1): 1.25}
    rows = [SourceLoss("run", a, step, "routers", "llm", value, 10, 2, 1e9) for (step, a), value in steps.items()]
    query = console.named_query("router_loss")
    found = console.query(fill(tmp_path, *rows), query.sql, {"run_id": "run", "every": 2})[1]
    assert found == [(0, 1.5, 2.0, 20), (2, 1.25, 1.25, 10)]


def test_shares_of_gradient_norms_are_those_of_their_squares(tmp_path: Path) -> None:
    rows = [GradNorm("run", 1, 2, "llm", 3.0), GradNorm("run", 1, 2, "vision", 4.0), GradNorm("run", 0, 2, "llm", 9.0)]
    query = console.named_query("grad_norms")
    found = console.query(fill(tmp_path, *rows), query.sql, {"run_id": "run"})[1]
    assert found == [(2, "llm", 3.0, 0.36), (2, "vision", 4.0, 0.64)]


def test_a_query_without_a_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "queries").mkdir()
    (tmp_path / "queries/bare.sql").write_text("-- purpose: nothing\nselect 1;")
    with pytest.raises(StoreError, match="lacks parameters, grain, units"):
        console.list_queries(tmp_path)
