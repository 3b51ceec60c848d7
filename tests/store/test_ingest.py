from __future__ import annotations

import shutil
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.errors import StoreError
from dflop.records import Correction
from dflop.store import check, live, schema, snapshot
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.spool import SpoolKey, SpoolWriter, encode, read_spool


def write(root: Path, *rows, run_id: str = "run", producer: str = "p") -> Path:
    with SpoolWriter(root, run_id, producer) as writer:
        for row in rows:
            writer.append(row)
    kind = schema.kind_of(type(rows[0]))
    return max((root / "spool" / kind / run_id).glob(f"{producer}-*"))


def stored(root: Path, cls: type = Correction) -> list:
    with Reader(root) as reader:
        return reader.records(cls)


def files(root: Path, area: str) -> list[str]:
    return sorted(path.relative_to(root / area).as_posix() for path in (root / area).rglob("*") if path.is_file())


def test_ingesting_twice_changes_nothing(tmp_path: Path, make) -> None:
    write(tmp_path, make.correction(0), make.correction(1))
    first, second = ingest(tmp_path), ingest(tmp_path)
    assert (first.num_files, first.num_rows, first.snapshot_seq) == (1, 2, 1)
    assert (second.num_files, second.num_rows, second.snapshot_seq) == (0, 0, 1)
    assert stored(tmp_path) == [make.correction(0), make.correction(1)]


def test_a_touched_or_copied_back_file_is_recognised_by_its_content(tmp_path: Path, make) -> None:
    path = write(tmp_path, make.correction())
    ingest(tmp_path)
    path.touch()
    assert ingest(tmp_path).num_quarantined_files == 0
    assert stored(tmp_path) == [make.correction()]


def test_many_files_go_through_several_batches(tmp_path: Path, make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "BATCH_FILES", 2)
    rows = [make.correction(i) for i in range(5)]
    for row in rows:
        write(tmp_path, row)
    lines: list[str] = []
    assert ingest(tmp_path, lines.append).num_files == 5
    assert lines == [f"ingested {n} rows of {n} of 5 files" for n in (2, 4, 5)]
    assert stored(tmp_path) == rows


def test_every_kind_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, make) -> None:
    every_kind = st.tuples(*(st.lists(make.strategy(cls), min_size=1, max_size=2) for cls in schema.CLASSES))

    @settings(max_examples=5, deadline=None)
    @given(every_kind)
    def check(rows_by_class: tuple[list, ...]) -> None:
        root = tmp_path_factory.mktemp("store")
        with SpoolWriter(root, "run", "p") as writer:
            for rows in rows_by_class:
                for row in rows:
                    writer.append(row)
        ingest(root)
        with Reader(root) as reader:
            for cls, rows in zip(schema.CLASSES, rows_by_class, strict=True):
                assert repr(reader.records(cls)) == repr(rows)

    check()


def truncate(path: Path, make) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def empty(path: Path, make) -> None:
    path.write_bytes(b"")


def damage(path: Path, make) -> None:
    data = bytearray(path.read_bytes())
    data[20:60] = bytes(40)
    path.write_bytes(data)


def drop_metadata(path: Path, make) -> None:
    pq.write_table(pq.read_table(path, partitioning=None).replace_schema_metadata({}), path)


def drop_a_column(path: Path, make) -> None:
    table = pq.read_table(path, partitioning=None).drop_columns(["factor"])
    path.write_bytes(encode(SpoolKey("correction", "run", "bad", 0), table))


def another_files_content(path: Path, make) -> None:
    path.write_bytes(encode(SpoolKey("correction", "run", "bad", 7), schema.to_table(Correction, [make.correction()])))


def nulls(path: Path, make) -> None:
    table = schema.to_table(Correction, [make.correction(factor=None)])
    path.write_bytes(encode(SpoolKey("correction", "run", "bad", 0), table))


def no_schema_version(path: Path, make) -> None:
    table = schema.to_table(Correction, [make.correction()])
    data = encode(SpoolKey("correction", "run", "bad", 0), table)
    metadata = pq.read_metadata(path).metadata | {b"dflop.schema_version": b"0"}
    assert data
    pq.write_table(table.replace_schema_metadata(metadata), path)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (truncate, "Parquet magic bytes not found"),
        (empty, "Parquet file size is 0 bytes"),
        (damage, ""),
        (drop_metadata, "dflop.kind in the file is None"),
        (drop_a_column, "do not match schema version"),
        (another_files_content, "dflop.seq in the file is b'7'"),
        (nulls, "hold nulls"),
        (no_schema_version, "schema version in the file is '0'"),
    ],
)
def test_a_bad_file_is_quarantined_and_its_neighbours_are_not(tmp_path: Path, make, spoil, reason: str) -> None:
    write(tmp_path, make.correction(0), producer="a")
    spoil(write(tmp_path, make.correction(1), producer="bad"), make)
    write(tmp_path, make.correction(2), producer="c")
    lines: list[str] = []
    report = ingest(tmp_path, lines.append)
    assert (report.num_files, report.num_quarantined_files) == (2, 1)
    assert stored(tmp_path) == [make.correction(0), make.correction(2)]
    assert len(files(tmp_path, "spool")) == 2
    assert files(tmp_path, "quarantine")[0].startswith("correction/run/bad-000000.parquet.")
    con, _ = snapshot.open_current(tmp_path)
    with con:
        ((path, why),) = con.execute("select path, reason from file_quarantine").fetchall()
    assert path == "correction/run/bad-000000.parquet"
    assert reason in why
    assert any(why in line for line in lines)
    assert ingest(tmp_path).num_quarantined_files == 0


def test_other_content_under_an_ingested_name_is_quarantined(tmp_path: Path, make) -> None:
    path = write(tmp_path, make.correction(0))
    ingest(tmp_path)
    key = SpoolKey("correction", "run", "p", 0)
    path.write_bytes(encode(key, schema.to_table(Correction, [make.correction(1)])))
    assert ingest(tmp_path).num_quarantined_files == 1
    assert stored(tmp_path) == [make.correction(0)]
    assert not path.exists()


def test_an_unknown_kind_is_quarantined_and_foreign_files_are_left_alone(tmp_path: Path, make) -> None:
    path = write(tmp_path, make.correction(0))
    other = tmp_path / "spool/gossip/run/p-000000.parquet"
    other.parent.mkdir(parents=True)
    shutil.copy(path, other)
    (path.parent / ".tmp-host-1-abc").write_bytes(b"half")
    (path.parent / "README").write_text("hello")
    assert ingest(tmp_path).num_quarantined_files == 1
    assert files(tmp_path, "spool") == [
        f"correction/run/{n}" for n in (".tmp-host-1-abc", "README", "p-000000.parquet")
    ]


def test_an_error_inside_the_transaction_leaves_nothing(tmp_path: Path, make, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, make.correction(0))
    insert = live.insert_table

    def fail(con: duckdb.DuckDBPyConnection, name: str, rows: object) -> None:
        if name == "ingest_manifest":
            con.execute("select * from missing")
        insert(con, name, rows)

    with monkeypatch.context() as broken:
        broken.setattr(live, "insert_table", fail)
        with pytest.raises(StoreError, match="ingest failed"):
            ingest(tmp_path)
    with live.open_live(tmp_path) as con:
        assert con.execute(
            "select (select count(*) from correction), (select count(*) from ingest_manifest)"
        ).fetchall() == [(0, 0)]
    assert ingest(tmp_path).num_rows == 1


def test_a_lost_live_database_is_rebuilt_from_the_spool(tmp_path: Path, make) -> None:
    for i in range(4):
        write(tmp_path, make.correction(i), make.correction(i + 10), producer=f"p{i}")
        if i == 1:
            ingest(tmp_path)
    before_seq = ingest(tmp_path).snapshot_seq
    before = stored(tmp_path)
    shutil.rmtree(tmp_path / "live")
    report = ingest(tmp_path)
    assert (report.num_files, report.snapshot_seq) == (4, before_seq + 1)
    assert stored(tmp_path) == before == read_spool(tmp_path, Correction)


def test_a_database_of_a_newer_duckdb_is_refused(tmp_path: Path, make) -> None:
    write(tmp_path, make.correction(0))
    ingest(tmp_path)
    with live.open_live(tmp_path) as con:
        live.set_meta(con, "duckdb_version", "99.0.0")
    with pytest.raises(StoreError, match=r"written by duckdb 99\.0\.0"):
        ingest(tmp_path)


def test_a_damaged_live_database_says_how_to_rebuild(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir(parents=True)
    (tmp_path / "live/dflop.duckdb").write_bytes(b"x" * 20_000)
    with pytest.raises(StoreError, match="spool is the truth"):
        ingest(tmp_path)
