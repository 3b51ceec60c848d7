"""Spool files and databases of earlier versions hold their rows for ever, in the columns of today."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from dflop import records as r
from dflop import resources
from dflop.cost.curve import edge_part
from dflop.cost.identity import tables_of_json
from dflop.store import live, migrate, schema
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.rebuild import rebuild, verify
from dflop.store.spool import SpoolKey
from tests.store.asking import fill, stored, write
from tests.store.spooled import read_spool

WAYS = (
    "recompute", "shard_optimizer", "max_tokens", "recomputed", "offloaded", "parameter_shards", "gather_s",
    "scatter_s", "cost_growth", "recompute_tokens", "merge_tokens",
)  # fmt: skip


def measurement() -> r.Measurement:
    return r.Measurement("model", "llm", "cpu", "torch", "fp32", 1, 2, "random", 4, 9, 81, 0.1, 0.2, 0.0, 0.0, 3, 8, 7)


def record_of(kind: str, make: Any) -> Any:
    if kind == "plan":
        return dataclasses.replace(make.plan(), sync_s=0.0, uniform_step_s=math.nan)
    if kind == "run_record":
        return make.run("done", 1.0)
    if kind == "correction":
        return make.correction(3, 1.25)  # of every size, in force, its own level
    if kind == "link_cost":
        return r.LinkCost("model", "cpu", "torch", "all_reduce", 2, 1, 1e-5, 1e9, "measured", 4, 0.1)
    return {"sample_shape": lambda: make.shape(0), "measurement": measurement, "cost_table": make.cost_table}[kind]()


def without(table: pa.Table, *names: str, inside: str = "", prune: Callable[[Any], Any] = lambda value: value) -> Any:
    """The table without columns `names`; column `inside`, where given, with its values pruned."""
    if inside:
        column = pa.array([prune(value) for value in table.column(inside).to_pylist()])
        table = table.set_column(table.schema.get_field_index(inside), inside, column)
    return table.drop_columns(list(names))


def first_version(kind: str, table: pa.Table) -> pa.Table:
    """Rows as version 1 of a kind held them."""
    if kind == "plan":
        bare = lambda places: [{k: v for k, v in place.items() if k not in WAYS} for place in places]  # noqa: E731, shorter than two functions
        bare_table = without(table, "sync_s", "uniform_step_s", inside="modules", prune=bare)
        return bare_table.append_column("layout", pa.repeat("split", len(table)))
    if kind == "cost_table":
        straight = lambda terms: {k: v for k, v in terms.items() if k not in ("layer_knots", "layer_bends")}  # noqa: E731, shorter than two functions
        for name in ("forward_s", "backward_s", "activation_bytes"):
            table = without(table, inside=name, prune=straight)
        return without(
            table, "trains", "recompute", "min_tokens", "max_tokens", "max_mean_length", "noise_frac",
            "optimizer_s_per_param", "fitted_at_s", "fp8",
        )  # fmt: skip
    if kind == "link_cost":
        return without(table, "fitted_at_s")
    if kind == "run_record":
        return without(table, "owner")
    if kind == "correction":
        return without(table, "min_tokens", "max_tokens", "sd_frac", "is_in_force", "level")
    if kind == "measurement":
        return without(table, "is_frozen", "recompute", "peak_bytes", "optimizer_s", "status", "fp8")
    return without(table, "media_level", "num_cut_tokens", "weight", "sum_sq_llm_tokens", "content_hash")


def before_trains(kind: str, table: pa.Table) -> pa.Table:
    """Cost tables as they were before they stated what trains."""
    is_frozen = [trains == "none" for trains in table.column("trains").to_pylist()]
    return without(table, "trains", "fp8").append_column("is_frozen", pa.array(is_frozen))


def write_old(root: Path, kind: str, record: Any, *lost: str) -> None:
    """Writes a spool file as version 1 did, columns `lost` left out."""
    path = write(root, record)
    table = pq.ParquetFile(path).read()
    metadata = {**table.schema.metadata, schema.VERSION_KEY: b"1"}
    pq.write_table(first_version(kind, table).drop_columns(list(lost)).replace_schema_metadata(metadata), path)


def test_files_of_the_first_version_are_read_for_ever(tmp_path: Path, make) -> None:
    expected = [record_of(kind, make) for kind in sorted(schema.UPGRADES)]
    for kind, record in zip(sorted(schema.UPGRADES), expected, strict=True):
        write_old(tmp_path, kind, record)
    report = ingest(tmp_path)
    assert (report.num_files, report.num_quarantined_files) == (len(expected), 0)
    found = [read_spool(tmp_path, type(record)) for record in expected]
    assert repr(found) == repr([[record] for record in expected])  # repr: NaN equals NaN
    assert repr([stored(tmp_path, type(record)) for record in expected]) == repr(found)
    rebuild(tmp_path)
    assert repr([stored(tmp_path, type(record)) for record in expected]) == repr(found)
    write_old(tmp_path, "plan", make.plan(), "modules")
    assert ingest(tmp_path).num_quarantined_files == 1, "an old file that lacks a column is set aside"


def test_files_of_a_kind_that_is_no_more_stay_and_are_files_of_no_rows(tmp_path: Path) -> None:
    key = SpoolKey("gate_reading", "run", "p", 0)
    path = tmp_path / "spool" / key.relative_path
    path.parent.mkdir(parents=True)
    rows = pa.table({"step": [1, 2]}).replace_schema_metadata({**key.metadata, schema.VERSION_KEY: b"1"})
    pq.write_table(rows, path)
    report = ingest(tmp_path)
    assert (report.num_files, report.num_rows) == (1, 0)
    assert (report.num_quarantined_files, report.num_newer_files) == (0, 0)
    assert ingest(tmp_path).num_files == 0
    rebuild(tmp_path)
    assert verify(tmp_path).problems == ()
    assert path.is_file()


def old_database(
    folder: Path, num_migrations: int, kind: str, *records: Any, books: str = "",
    as_then: Callable[[str, pa.Table], pa.Table] = first_version,
) -> Path:  # fmt: skip
    """A store whose live database stopped at a migration and holds records as a kind's first version had them.

    It has been ingested into once; `books` is SQL that notes what was ingested and published before.
    """
    old = Path(shutil.copytree(resources.path("sql"), folder / "sql"))
    for path in sorted((old / "migrations").glob("*.sql"))[num_migrations:]:
        path.unlink()
    for path in (old / "views").glob("*.sql"):
        path.unlink()
    table = schema.to_table(type(records[0]), records)
    if kind in schema.UPGRADES:
        table = as_then(kind, table)
    for name, value in (("_run_id", "run"), ("_producer", "p"), ("_seq", 0)):
        table = table.append_column(name, pa.repeat(pa.scalar(value), len(records)))
    root = folder / "store"
    (root / "live").mkdir(parents=True)
    with duckdb.connect(str(root / "live/dflop.duckdb")) as con:
        migrate.apply(con, old)
        live.insert_table(con, kind, table)
        con.execute(books)
    ingest(root)
    return root


def test_a_store_of_the_first_release_grows_into_today_s(tmp_path: Path, make) -> None:
    """Migrations 1 to 3 were released with their rows and without roll-ups, publish log or leases."""
    books = (
        "insert into ingest_manifest values ('step_observation', 'run', 'p', 0, repeat('0', 64), 1, 1, 3, 1000.0);"
        "insert into publish_log values (7, 1000.0, '1.5.6')"
    )
    observations = [make.observation(step) for step in range(3)]
    with Reader(old_database(tmp_path, 3, "step_observation", *observations, books=books)) as reader:
        assert reader.seq == 8
        assert sorted(reader.arrays("v_step", ["step"])["step"]) == [0, 1, 2]
        assert reader.arrays("ingest_manifest", ["snapshot_seq"])["snapshot_seq"].tolist() == [8]


def test_plans_in_a_database_of_an_earlier_version_stay(tmp_path: Path, make) -> None:
    record = record_of("plan", make)
    with Reader(old_database(tmp_path, 7, "plan", record)) as reader:
        assert repr(reader.records(r.Plan)) == repr([record])
        assert reader.arrays("v_plan", ["layout_text"])["layout_text"].tolist() == [
            "vision tp1 pp1 dp2 | llm tp1 pp2 dp1"
        ]


def test_cost_tables_from_before_they_stated_what_trains_have_it_read_off_their_terms(tmp_path: Path, make) -> None:
    whole = make.cost_table(table_id="all")
    tower = dataclasses.replace(whole, table_id="tower", trains="projector", backward_s=edge_part(whole.backward_s))
    frozen = dataclasses.replace(whole, table_id="frozen", trains="none", backward_s=edge_part(whole.backward_s))
    tables = [whole, tower, frozen]
    old = before_trains("cost_table", schema.to_table(r.CostTable, tables))
    assert schema.from_table(r.CostTable, schema.upgrade("cost_table", 3, old)) == tables
    with Reader(old_database(tmp_path, 26, "cost_table", *tables, as_then=before_trains)) as reader:
        assert sorted(reader.records(r.CostTable), key=tables.index) == tables
    rows = [{k: v for k, v in row.items() if k != "trains"} for row in map(r.to_dict, tables)]
    known = [{**row, "is_frozen": table.is_frozen} for row, table in zip(rows, tables, strict=True)]
    assert tables_of_json(json.dumps([*known, r.to_dict(tower)]).encode()) == [*tables, tower]


def test_corrections_in_a_database_of_an_earlier_version_stay_in_force(tmp_path: Path, make) -> None:
    record = record_of("correction", make)
    root = old_database(tmp_path, 10, "correction", record)
    with Reader(fill(root, make.cost_table(), run_id="later")) as reader:
        assert reader.records(r.Correction) == [record]
        assert reader.corrections_in_force("model") == [record]
        assert (record.level, record.max_tokens) == (1.25, r.ALL_TOKENS)
