from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest

from dflop.errors import StoreError
from dflop.store import live, settings, snapshot
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.spool import SpoolWriter


def publish(root: Path, make, step: int = 0) -> int:
    with SpoolWriter(root, "run", "p") as writer:
        writer.append(make.correction(step))
    return ingest(root).snapshot_seq


def snapshots(root: Path) -> list[str]:
    return sorted(os.listdir(root / "snapshots"))


def test_a_snapshot_is_read_only_and_named_by_current_and_the_link(tmp_path: Path, make) -> None:
    publish(tmp_path, make)
    current = snapshot.read_current(tmp_path)
    assert current is not None
    path = tmp_path / current.file
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert os.readlink(tmp_path / "current.duckdb") == current.file == "snapshots/dflop-000001.duckdb"
    assert snapshots(tmp_path) == ["dflop-000001.duckdb"]


def test_a_snapshot_carries_views_and_comments_in_an_old_storage_version(tmp_path: Path, make) -> None:
    publish(tmp_path, make)
    con, _ = snapshot.open_current(tmp_path)
    with con:
        assert con.execute("select count(*) from v_correction_latest").fetchone() == (1,)
        assert con.execute("select count(*) from duckdb_tables() where comment is null").fetchone() == (0,)
        assert con.execute(
            "select count(*) from duckdb_columns() where comment is null and table_name = 'plan'"
        ).fetchone() == (0,)
        ((tags,),) = con.execute(
            "select tags from duckdb_databases() where database_name = current_database()"
        ).fetchall()
    assert tags["storage_version"].startswith("v1.4")


def test_a_reader_keeps_its_snapshot_while_others_are_published_and_collected(tmp_path: Path, make) -> None:
    settings.init(tmp_path, grace_s=0, keep_snapshots=2)
    publish(tmp_path, make, 0)
    with Reader(tmp_path) as reader:
        for step in range(1, 4):
            publish(tmp_path, make, step)
        assert reader.seq == 1
        assert reader.records(type(make.correction())) == [make.correction(0)]
    assert snapshots(tmp_path) == [f"dflop-{seq:06d}.duckdb" for seq in (3, 4)]


def test_the_grace_period_counts_from_the_replacement_and_not_from_the_birth_of_a_snapshot(
    tmp_path: Path, make
) -> None:
    settings.init(tmp_path, grace_s=1000, keep_snapshots=1)
    for step in range(4):
        publish(tmp_path, make, step)
    now_s = time.time()
    for seq, age_s in ((1, 5000), (2, 3000), (3, 500), (4, 0)):
        os.utime(tmp_path / f"snapshots/dflop-{seq:06d}.duckdb", (now_s - age_s, now_s - age_s))
    # 1 was replaced 3000 s ago, 2 only 500 s ago.
    assert [path.name for path in snapshot.expired(tmp_path)] == ["dflop-000001.duckdb"]


def test_fewer_snapshots_than_are_kept_never_expire(tmp_path: Path, make) -> None:
    settings.init(tmp_path, grace_s=0, keep_snapshots=5)
    for step in range(3):
        publish(tmp_path, make, step)
    assert snapshot.expired(tmp_path) == []


def test_a_stale_current_that_names_a_collected_file_is_read_again(tmp_path: Path, make, monkeypatch) -> None:
    publish(tmp_path, make, 0)
    stale = snapshot.read_current(tmp_path)
    publish(tmp_path, make, 1)
    (tmp_path / stale.file).unlink()
    seen = iter([stale, stale])
    read = snapshot.read_current
    monkeypatch.setattr(snapshot, "read_current", lambda root: next(seen, None) or read(root))
    with Reader(tmp_path) as reader:
        assert reader.seq == 2


def test_a_current_written_by_a_later_dflop_is_understood(tmp_path: Path, make) -> None:
    publish(tmp_path, make, 0)
    found = json.loads((tmp_path / "CURRENT").read_text())
    (tmp_path / "CURRENT").write_text(json.dumps({**found, "colour": "blue"}))
    assert snapshot.read_current(tmp_path).seq == 1


def test_a_snapshot_opens_while_the_live_database_is_being_written(tmp_path: Path, make) -> None:
    publish(tmp_path, make)
    with live.open_live(tmp_path) as con, live.transaction(con):
        con.execute("delete from correction")
        with Reader(tmp_path) as reader:
            assert len(reader.records(type(make.correction()))) == 1


def test_a_commit_without_a_publish_is_published_by_the_next_pass(
    tmp_path: Path, make, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, make, 0)

    def die(*_args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(snapshot, "publish_if_stale", die)
        with pytest.raises(KeyboardInterrupt):
            publish(tmp_path, make, 1)
    report = ingest(tmp_path)
    assert (report.num_files, report.snapshot_seq) == (0, 2)
    with Reader(tmp_path) as reader:
        assert len(reader.records(type(make.correction()))) == 2


def test_a_full_disk_while_publishing_keeps_the_old_snapshot(
    tmp_path: Path, make, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, make, 0)

    def full(_path: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(snapshot.durable, "fsync_file", full)
        with SpoolWriter(tmp_path, "run", "q") as writer:
            writer.append(make.correction(1))
        with pytest.raises(StoreError, match="No space left"):
            ingest(tmp_path)
    with Reader(tmp_path) as reader:
        assert reader.seq == 1
    assert ingest(tmp_path).snapshot_seq == 3  # a number is never used twice, not even by a publish that died
    assert snapshots(tmp_path) == ["dflop-000001.duckdb", "dflop-000003.duckdb"]


def test_a_lost_or_damaged_snapshot_is_told_and_replaced(tmp_path: Path, make) -> None:
    publish(tmp_path, make)
    (tmp_path / "snapshots/dflop-000001.duckdb").unlink()
    with pytest.raises(StoreError, match="cannot open snapshot 1"):
        snapshot.open_current(tmp_path)
    assert ingest(tmp_path).snapshot_seq == 2
    snapshot.open_current(tmp_path)[0].close()


def test_an_empty_store_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no snapshot yet"):
        snapshot.open_current(tmp_path)
    (tmp_path / "CURRENT").write_text("{")
    with pytest.raises(StoreError, match="CURRENT is damaged"):
        snapshot.open_current(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "emptied", "overwritten"])
def test_ingesting_replaces_a_damaged_snapshot_although_nothing_is_new(tmp_path: Path, make, damage: str) -> None:
    publish(tmp_path, make)
    path = tmp_path / "snapshots" / "dflop-000001.duckdb"
    path.chmod(0o644)
    if damage == "overwritten":
        with path.open("r+b") as file:
            file.write(bytes(range(256)) * 16)
    else:
        os.truncate(path, 0 if damage == "emptied" else path.stat().st_size // 2)
    assert ingest(tmp_path).snapshot_seq == 2
    with Reader(tmp_path) as reader:
        assert reader.records(type(make.correction())) == [make.correction()]
    assert ingest(tmp_path).snapshot_seq == 2
