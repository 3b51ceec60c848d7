import shutil
from pathlib import Path

import duckdb
import pytest

from dflop import resources
from dflop.errors import StoreError
from dflop.store import live, migrate


@pytest.fixture
def sql_root(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resources.path("sql"), tmp_path / "sql"))


@pytest.fixture
def con(sql_root: Path) -> duckdb.DuckDBPyConnection:
    con = duckdb.connect()
    migrate.apply(con, sql_root)
    return con


def test_a_new_migration_runs_once_and_is_recorded(con: duckdb.DuckDBPyConnection, sql_root: Path) -> None:
    number = len(migrate.sql_files("migrations", sql_root)) + 1
    (sql_root / f"migrations/{number:04d}_more.sql").write_text("create table more (a bigint);")
    assert migrate.apply(con, sql_root) == [f"{number:04d}_more"]
    assert con.execute("select name from schema_migration order by version").fetchall()[-1] == ("more",)
    assert migrate.apply(con, sql_root) == []


def test_an_edited_migration_is_refused(con: duckdb.DuckDBPyConnection, sql_root: Path) -> None:
    with open(sql_root / "migrations/0001_init.sql", "a") as file:
        file.write("-- edited\n")
    with pytest.raises(StoreError, match="0001_init was edited"):
        migrate.apply(con, sql_root)


def test_a_store_of_a_newer_dflop_is_refused(con: duckdb.DuckDBPyConnection, sql_root: Path) -> None:
    sorted((sql_root / "migrations").glob("*.sql"))[-1].unlink()
    with pytest.raises(StoreError, match="written by a newer dflop"):
        migrate.apply(con, sql_root)


def test_a_failing_migration_leaves_nothing(con: duckdb.DuckDBPyConnection, sql_root: Path) -> None:
    number = len(migrate.sql_files("migrations", sql_root)) + 1
    path = sql_root / f"migrations/{number:04d}_broken.sql"
    path.write_text("create table half (a bigint); select * from missing;")
    with pytest.raises(StoreError, match="does not run"), live.transaction(con):
        migrate.apply(con, sql_root)
    assert con.execute("select count(*) from duckdb_tables() where table_name = 'half'").fetchone() == (0,)
    assert con.execute("select max(version) from schema_migration").fetchone() == (number - 1,)


def test_views_follow_their_files(con: duckdb.DuckDBPyConnection, sql_root: Path) -> None:
    for path in (sql_root / "views").glob("*.sql"):
        path.unlink()
    (sql_root / "views/1_v_new.sql").write_text("create or replace view v_new as select 1 as a;")
    assert migrate.apply(con, sql_root) == ["views"]
    views = con.execute("select view_name from duckdb_views() where not internal").fetchall()
    assert views == [("v_new",)]
