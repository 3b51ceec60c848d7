import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflop.errors import StoreError
from dflop.records import Correction
from dflop.store import file_check, live, schema
from dflop.store.ingest import ingest
from dflop.store.spool import SpoolKey, encode
from tests.store.asking import fill, rows, stored, write


def files(root: Path, area: str) -> list[str]:
    return sorted(path.relative_to(root / area).as_posix() for path in (root / area).rglob("*") if path.is_file())


def test_many_files_go_through_several_batches(tmp_path: Path, make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_check, "BATCH_FILES", 2)
    written = [make.correction(i) for i in range(5)]
    for row in written:
        write(tmp_path, row)
    lines: list[str] = []
    assert ingest(tmp_path, lines.append).num_files == 5
    assert lines == [f"ingested {n} rows of {n} of 5 files" for n in (2, 4, 5)]
    assert stored(tmp_path) == written


def damaged(data: bytes) -> bytes:
    return data[:20] + bytes(40) + data[60:]


def encoded(producer: str, table: pa.Table, seq: int = 0) -> bytes:
    return encode(SpoolKey("correction", "run", producer, seq), table)


def with_metadata(path: Path, metadata: dict[bytes, bytes]) -> None:
    pq.write_table(pq.ParquetFile(path).read().replace_schema_metadata(metadata), path)


def test_bad_files_are_quarantined_and_neighbours_are_not(tmp_path: Path, make) -> None:
    reasons = {
        "truncated": "Parquet magic bytes not found", "empty": "Parquet file size is 0 bytes", "damaged": "",
        "no-metadata": "dflop.kind in the file is None", "no-column": "do not match schema version",
        "of-another": "dflop.seq in the file is b'7'", "nulls": "hold nulls",
        "no-version": "schema version in the file is '0'",
    }  # fmt: skip
    write(tmp_path, make.correction(0), producer="a")
    path = {name: write(tmp_path, make.correction(1), producer=name) for name in reasons}
    write(tmp_path, make.correction(2), producer="z")
    table, data = schema.to_table(Correction, [make.correction()]), path["damaged"].read_bytes()
    path["truncated"].write_bytes(data[:-20])
    path["empty"].write_bytes(b"")
    path["damaged"].write_bytes(damaged(data))
    with_metadata(path["no-metadata"], {})
    path["no-column"].write_bytes(encoded("no-column", table.drop_columns(["factor"])))
    path["of-another"].write_bytes(encoded("of-another", table, seq=7))
    path["nulls"].write_bytes(encoded("nulls", schema.to_table(Correction, [make.correction(factor=None)])))
    with_metadata(path["no-version"], pq.read_metadata(path["no-version"]).metadata | {schema.VERSION_KEY: b"0"})

    lines: list[str] = []
    report = ingest(tmp_path, lines.append)
    assert (report.num_files, report.num_quarantined_files) == (2, len(reasons))
    assert stored(tmp_path) == [make.correction(0), make.correction(2)]
    assert len(files(tmp_path, "spool")) == 2
    bad = {f"correction/run/{name}-000000" for name in reasons}
    assert {name.partition(".parquet.")[0] for name in files(tmp_path, "quarantine")} == bad
    noted = {row["path"]: row["reason"] for row in rows(tmp_path, "select path, reason from file_quarantine")}
    assert noted.keys() == {f"{name}.parquet" for name in bad}
    for name, reason in reasons.items():
        why = noted[f"correction/run/{name}-000000.parquet"]
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


def test_a_database_of_a_newer_duckdb_is_refused(tmp_path: Path, make) -> None:
    fill(tmp_path, make.correction(0))
    with live.open_live(tmp_path) as (con, _):
        live.set_meta(con, "duckdb_version", "99.0.0")
    with pytest.raises(StoreError, match=r"written by duckdb 99\.0\.0"):
        ingest(tmp_path)
