"""Versions and damage: what is bad, what is old, and what is only too new."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflop.records import Correction
from dflop.store import check, schema
from dflop.store.ingest import ingest
from dflop.store.rebuild import rebuild
from dflop.store.spool import SpoolKey, encode, read_spool
from tests.store.asking import stored, write


def set_version(path: Path, version: int, kind: str | None = None) -> None:
    table = pq.ParquetFile(path).read()
    metadata = {**table.schema.metadata, schema.VERSION_KEY: str(version).encode()}
    if kind:
        metadata[b"dflop.kind"] = kind.encode()
    pq.write_table(table.replace_schema_metadata(metadata), path)


def test_files_of_an_older_schema_version_are_brought_forward_for_ever(tmp_path: Path, make, monkeypatch) -> None:
    monkeypatch.delitem(schema.UPGRADES, "correction")
    path = write(tmp_path, make.correction(0, factor=1.5))
    old = pq.ParquetFile(path).read()
    # Let version 1 be one that had no residual and called the factor a percentage.
    old = old.drop_columns(["residual_frac"]).set_column(4, "factor_percent", pa.array([150.0]))
    pq.write_table(old, path)

    def to_version_2(table: pa.Table) -> pa.Table:
        factor = pa.array([x / 100 for x in table["factor_percent"].to_pylist()])
        table = table.set_column(table.schema.get_field_index("factor_percent"), "factor", factor)
        return table.add_column(5, "residual_frac", pa.array([0.1] * table.num_rows))

    monkeypatch.setitem(schema.UPGRADES, "correction", (to_version_2,))
    write(tmp_path, make.correction(1))
    assert schema.version_of("correction") == 2
    report = ingest(tmp_path)
    assert (report.num_files, report.num_quarantined_files) == (2, 0)
    expected = [make.correction(0, factor=1.5), make.correction(1)]
    assert stored(tmp_path) == expected
    assert read_spool(tmp_path, Correction) == expected
    rebuild(tmp_path)
    assert stored(tmp_path) == expected


@pytest.mark.parametrize("newer", ["version", "kind"])
def test_files_of_a_newer_dflop_wait_in_the_spool(tmp_path: Path, make, newer: str) -> None:
    write(tmp_path, make.correction(0))
    path = write(tmp_path, make.correction(1))
    if newer == "version":
        set_version(path, schema.version_of("correction") + 1)
    else:
        target = tmp_path / "spool/rumour/run/p-000000.parquet"
        target.parent.mkdir(parents=True)
        table = pq.ParquetFile(path).read()
        target.write_bytes(path.read_bytes())
        pq.write_table(
            table.replace_schema_metadata({**table.schema.metadata, b"dflop.kind": b"rumour", b"dflop.seq": b"0"}),
            target,
        )
        path.unlink()
        path = target
    lines: list[str] = []
    report = ingest(tmp_path, lines.append)
    assert (report.num_files, report.num_newer_files, report.num_quarantined_files) == (1, 1, 0)
    assert path.exists()
    assert any("left in the spool for a newer dflop" in line for line in lines)


def test_every_flipped_bit_is_noticed(tmp_path: Path, make) -> None:
    """Page checksums cover the data, the key and the schema cover the footer; padding alone may change unnoticed."""
    key = SpoolKey("correction", "run", "p", 0)
    rows = [make.correction(step, factor=1.0 + step) for step in range(50)]
    table = schema.to_table(Correction, rows)
    data = encode(key, table)
    unnoticed = 0
    for position in range(4, len(data) - 8, 3):
        spoilt = bytearray(data)
        spoilt[position] ^= 0x10
        try:
            found = check.decode(key, bytes(spoilt))
        except (ValueError, OSError, pa.ArrowException, check.NewerSchemaError):
            continue
        unnoticed += 1
        assert found.equals(table.replace_schema_metadata()), position
    assert unnoticed < len(data) / 3
