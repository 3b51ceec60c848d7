"""Versions and damage: what is bad, what is old, and what is only too new."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflop.records import Correction
from dflop.store import file_check, schema
from dflop.store.ingest import ingest
from dflop.store.spool import SpoolKey, encode
from tests.store.asking import write


def change_metadata(path: Path, **changes: str) -> None:
    table = pq.ParquetFile(path).read()
    changed = {f"dflop.{key}".encode(): text.encode() for key, text in changes.items()}
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, **changed}), path)


@pytest.mark.parametrize("newer", ["version", "kind"])
def test_files_of_a_newer_dflop_wait_in_the_spool(tmp_path: Path, make, newer: str) -> None:
    write(tmp_path, make.correction(0))
    path = write(tmp_path, make.correction(1))
    if newer == "version":
        change_metadata(path, schema_version=str(schema.version_of("correction") + 1))
    else:
        change_metadata(path, kind="rumour", seq="0")
        target = tmp_path / "spool/rumour/run/p-000000.parquet"
        target.parent.mkdir(parents=True)
        path = path.rename(target)
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
            found = file_check.decode(key, bytes(spoilt))
        except (ValueError, OSError, pa.ArrowException, file_check.NewerSchemaError):
            continue
        unnoticed += 1
        assert found.equals(table.replace_schema_metadata()), position
    assert unnoticed < len(data) / 3
