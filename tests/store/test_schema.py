import dataclasses
import inspect
from datetime import datetime, timedelta

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop import records
from dflop.store import migrate, schema
from dflop.store.spool import SpoolKey, encode


@pytest.mark.parametrize("cls", schema.KINDS.values())
def test_records_survive_arrow_in_the_columns_of_their_plain_dicts(cls: type, make) -> None:
    """Plain dicts row by row are the obvious way; the quick one equals it, the bytes of spool files included."""
    kind = schema.kind_of(cls)

    @settings(max_examples=10, deadline=None)
    @given(st.lists(make.strategy(cls), max_size=4))
    def check(rows: list) -> None:
        plain = [dataclasses.asdict(row) for row in rows]
        assert repr([records.to_dict(row) for row in rows]) == repr(plain)
        expected, found = pa.Table.from_pylist(plain, schema=schema.arrow_schema(kind)), schema.to_table(cls, rows)
        assert repr(found.to_pylist()) == repr(expected.to_pylist())
        found.validate(full=True)
        key = SpoolKey(kind, "run", "p", 0)
        assert encode(key, found) == encode(key, expected)
        assert repr(schema.from_table(cls, found)) == repr(rows)  # repr: NaN equals NaN, 0.0 differs from -0.0

    check()


@pytest.fixture(scope="module")
def migrated() -> duckdb.DuckDBPyConnection:
    con = duckdb.connect()
    migrate.apply(con)
    return con


def columns_of(con: duckdb.DuckDBPyConnection, table: str) -> list[tuple[str, str]]:
    # Rows go in by name: a column that a later migration adds stands at the end.
    return sorted(row[:2] for row in con.execute(f'describe "{table}"').fetchall())


def test_sql_declares_the_columns_of_the_records(migrated: duckdb.DuckDBPyConnection) -> None:
    provenance = [("_run_id", "VARCHAR"), ("_producer", "VARCHAR"), ("_seq", "BIGINT")]
    for kind in schema.KINDS:
        expected = duckdb.connect()
        expected.register("t", schema.arrow_schema(kind).empty_table())
        assert columns_of(migrated, kind) == sorted(columns_of(expected, "t") + provenance), kind


def test_every_table_and_column_is_commented(migrated: duckdb.DuckDBPyConnection) -> None:
    silent = migrated.execute(
        "select table_name from duckdb_tables() where comment is null union all "
        "select view_name from duckdb_views() where comment is null and not internal union all "
        "select table_name || '.' || column_name from duckdb_columns() where not internal and comment is null"
    ).fetchall()
    assert silent == []


def test_times_of_views_are_timestamps(migrated: duckdb.DuckDBPyConnection) -> None:
    times = migrated.execute(
        "select table_name, column_name, data_type, duckdb_columns.comment like '%UTC' "
        "from duckdb_columns() join duckdb_views() on table_name = view_name "
        "where not duckdb_views.internal and regexp_matches(column_name, '_at(_s)?$')"
    ).fetchall()
    assert len(times) > 20
    assert {(name.endswith("_at"), kind, is_utc) for _, name, kind, is_utc in times} == {(True, "TIMESTAMP", True)}


@given(st.floats() | st.floats(-7e10, 3e11) | st.none())
def test_any_number_is_a_time_or_null(migrated: duckdb.DuckDBPyConnection, value: float | None) -> None:
    ((found,),) = migrated.execute("select utc(?::double)", [value]).fetchall()
    is_time = value is not None and -62135596800 <= value <= 253402300799
    assert (found is not None) == is_time
    if is_time:
        expected = datetime(1970, 1, 1) + timedelta(microseconds=round(value * 1e6))
        assert abs(found - expected) <= timedelta(microseconds=1)


def test_every_record_that_names_a_run_or_a_profile_has_a_table() -> None:
    classes = [c for _, c in inspect.getmembers(records, inspect.isclass) if dataclasses.is_dataclass(c)]
    named = {c for c in classes if {"run_id", "profile_key"} & {field.name for field in dataclasses.fields(c)}}
    assert named == set(schema.KINDS.values())


@pytest.mark.parametrize("items", [7, ("a picture",), None])
def test_a_value_that_does_not_fit_is_refused(make, items) -> None:
    with pytest.raises(pa.ArrowException):
        schema.to_table(records.Correction, [make.correction(factor="fast")])
    with pytest.raises(pa.ArrowException):
        schema.to_table(records.SampleShape, [dataclasses.replace(make.shape(0), items=items)])
