from __future__ import annotations

import dataclasses
import inspect

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop import records
from dflop.store import migrate, schema
from dflop.store.spool import SpoolKey, encode


@pytest.mark.parametrize("cls", schema.CLASSES)
def test_records_survive_arrow(cls: type, make) -> None:
    @settings(max_examples=20, deadline=None)
    @given(st.lists(make.strategy(cls), max_size=3))
    def check(rows: list) -> None:
        table = schema.to_table(cls, rows)
        assert table.schema.equals(schema.arrow_schema(schema.kind_of(cls)))
        assert repr(schema.from_table(cls, table)) == repr(rows)  # repr: NaN equals NaN, 0.0 differs from -0.0

    check()


@pytest.mark.parametrize("cls", schema.CLASSES)
def test_columns_are_those_of_the_plain_dicts_row_by_row(cls: type, make) -> None:
    """The obvious way, which the quick one is held equal to; the bytes of spool files, too."""

    @settings(max_examples=20, deadline=None)
    @given(st.lists(make.strategy(cls), max_size=4))
    def check(rows: list) -> None:
        plain = [dataclasses.asdict(row) for row in rows]
        assert repr([records.to_dict(row) for row in rows]) == repr(plain)
        kind = schema.kind_of(cls)
        expected, found = pa.Table.from_pylist(plain, schema=schema.arrow_schema(kind)), schema.to_table(cls, rows)
        assert repr(found.to_pylist()) == repr(expected.to_pylist())
        found.validate(full=True)
        key = SpoolKey(kind, "run", "p", 0)
        assert encode(key, found) == encode(key, expected)

    check()


@pytest.mark.parametrize("kind", schema.KINDS)
def test_sql_declares_the_columns_of_the_records(kind: str) -> None:
    con = duckdb.connect()
    migrate.apply(con)
    expected = duckdb.connect()
    expected.register("t", schema.arrow_schema(kind).empty_table())
    provenance = [("_run_id", "VARCHAR"), ("_producer", "VARCHAR"), ("_seq", "BIGINT")]

    def columns(con: duckdb.DuckDBPyConnection, table: str) -> list:
        return [row[:2] for row in con.execute(f'describe "{table}"').fetchall()]

    # Rows go in by name: a column that a later migration adds stands at the end.
    assert sorted(columns(con, kind)) == sorted(columns(expected, "t") + provenance)


def test_every_table_and_column_is_commented() -> None:
    con = duckdb.connect()
    migrate.apply(con)
    tables = con.execute("select table_name from duckdb_tables() where comment is null").fetchall()
    views = con.execute("select view_name from duckdb_views() where comment is null and not internal").fetchall()
    columns = con.execute(
        "select table_name, column_name from duckdb_columns() join duckdb_tables() using (table_name)"
        " where duckdb_columns.comment is null"
    ).fetchall()
    assert (tables, views, columns) == ([], [], [])


def test_every_record_that_names_a_run_or_a_profile_has_a_table() -> None:
    rows = [c for _, c in inspect.getmembers(records, inspect.isclass) if {"run_id", "profile_key"} & set(_fields(c))]
    assert set(rows) == set(schema.CLASSES)


def _fields(cls: type) -> list[str]:
    return list(getattr(cls, "__dataclass_fields__", {}))


def test_a_value_that_does_not_fit_is_refused(make) -> None:
    with pytest.raises(pa.ArrowException):
        schema.to_table(records.Correction, [make.correction(factor="fast")])


@pytest.mark.parametrize("items", [7, ("a picture",), None])
def test_a_value_where_records_belong_is_refused(make, items) -> None:
    with pytest.raises(pa.ArrowException):
        schema.to_table(records.SampleShape, [dataclasses.replace(make.shape(0), items=items)])
