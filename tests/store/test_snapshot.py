import errno
import math
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import duckdb
import pytest

from dflop.errors import StoreError
from dflop.records import Correction, Decision
from dflop.store import live, retention, settings, snapshot
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.rebuild import rebuild
from tests.store.asking import fill, rows, stored, write

DECISION = Decision(
    "run", 1, 5, "drift_cost", "llm", "noticed", 1.2, 1.0, math.nan, math.nan, 8, "plan", "", "slow", 1000.0
)


def publish(root: Path, make, step: int = 0) -> None:
    fill(root, make.correction(step))


def snapshots(root: Path) -> list[str]:
    return sorted(os.listdir(root / "snapshots"))


def test_a_snapshot_is_read_only_named_by_current_and_the_link_and_carries_views_and_comments(
    tmp_path: Path, make
) -> None:
    publish(tmp_path, make)
    current = snapshot.read_current(tmp_path)
    assert current is not None
    path = tmp_path / current.file
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert os.readlink(tmp_path / "current.duckdb") == current.file == "snapshots/dflop-000001.duckdb"
    assert snapshots(tmp_path) == ["dflop-000001.duckdb"]
    assert len(rows(tmp_path, "from v_correction_latest")) == 1
    assert rows(tmp_path, "from duckdb_tables() where comment is null") == []
    assert rows(tmp_path, "from duckdb_columns() where comment is null and table_name = 'plan'") == []
    (found,) = rows(tmp_path, "select tags from duckdb_databases() where database_name = current_database()")
    assert dict(found["tags"])["storage_version"].startswith("v1.4"), "older clients read it"


def test_a_live_database_that_older_clients_cannot_open_is_copied_into_one_that_they_can(tmp_path: Path, make) -> None:
    settings.init(tmp_path)
    path = live.live_file(tmp_path)
    path.parent.mkdir()
    duckdb.connect(str(path), config={"storage_compatibility_version": "latest"}).close()
    publish(tmp_path, make)
    with live.open_live(tmp_path) as (con, _):
        (version,) = con.execute("select tags['storage_version'] from duckdb_databases() where not internal").fetchall()
    assert version[0] > "v1.4.1"
    (found,) = rows(tmp_path, "select tags from duckdb_databases() where database_name = current_database()")
    assert dict(found["tags"])["storage_version"].startswith("v1.4")
    assert stored(tmp_path) == [make.correction(0)]


def test_a_file_that_cannot_be_copied_leaves_the_last_snapshot(tmp_path: Path, make, monkeypatch) -> None:
    publish(tmp_path, make, 0)
    (tmp_path / "bin").mkdir()
    cp = tmp_path / "bin/cp"
    cp.write_text('#!/bin/sh\necho "cp: error writing: No space left on device" >&2; exit 1\n')
    cp.chmod(0o755)
    with monkeypatch.context() as full:
        full.setenv("PATH", str(cp.parent))
        with pytest.raises(StoreError, match="No space left on device"):
            publish(tmp_path, make, 1)
    assert snapshots(tmp_path) == ["dflop-000001.duckdb"]
    assert stored(tmp_path) == [make.correction(0)]
    publish(tmp_path, make, 2)
    assert len(stored(tmp_path)) == 3


def test_a_reader_keeps_its_snapshot_while_others_are_published_and_collected(tmp_path: Path, make) -> None:
    settings.init(tmp_path, grace_s=0, keep_snapshots=2)
    publish(tmp_path, make, 0)
    with Reader(tmp_path) as reader:
        for step in range(1, 4):
            publish(tmp_path, make, step)
        assert reader.seq == 1
        assert reader.records(Correction) == [make.correction(0)]
    assert snapshots(tmp_path) == [f"dflop-{seq:06d}.duckdb" for seq in (3, 4)]


def test_the_grace_period_counts_from_the_replacement_and_not_from_the_birth_of_a_snapshot(tmp_path: Path) -> None:
    settings.init(tmp_path, grace_s=1000, keep_snapshots=1)
    (tmp_path / "snapshots").mkdir()
    now_s = time.time()
    for seq, age_s in ((1, 5000), (2, 3000), (3, 500), (4, 0)):
        path = tmp_path / f"snapshots/dflop-{seq:06d}.duckdb"
        path.touch()
        os.utime(path, (now_s - age_s, now_s - age_s))
    # 1 was replaced 3000 s ago, 2 only 500 s ago.
    assert [path.name for path in snapshot.expired(tmp_path)] == ["dflop-000001.duckdb"]
    for keep in (4, 5):
        settings.init(tmp_path, grace_s=0, keep_snapshots=keep)
        assert snapshot.expired(tmp_path) == [], "fewer than are kept never expire"


def laid_out(root: Path, sizes: dict[int, int]) -> set[int]:
    """Snapshots by age in seconds with sizes; returns the ages of those that are kept."""
    shutil.rmtree(root / "snapshots", ignore_errors=True)
    (root / "snapshots").mkdir()
    now_s = 1_000_000 * 600 + 599.0  # the last second of a slot of ten minutes
    by_path = {}
    for seq, (age_s, num_bytes) in enumerate(sorted(sizes.items(), reverse=True), 1):
        path = root / f"snapshots/dflop-{seq:06d}.duckdb"
        path.touch()
        os.truncate(path, num_bytes)
        os.utime(path, (now_s - age_s, now_s - age_s))
        by_path[path] = age_s
    with pytest.MonkeyPatch.context() as clock:
        clock.setattr(time, "time", lambda: now_s)
        return set(by_path.values()) - {by_path[path] for path in snapshot.expired(root)}


def test_the_newest_stay_then_one_in_ten_minutes_for_an_hour(tmp_path: Path) -> None:
    settings.init(tmp_path, keep_snapshots=3, max_snapshots_ratio=1000)
    every_20_s = {age_s: 1 for age_s in range(0, 7200, 20)}
    assert laid_out(tmp_path, every_20_s) == {0, 20, 40, 580, 1180, 1780, 2380, 2980, 3580}
    assert laid_out(tmp_path, {0: 1, 5000: 1, 9000: 1}) == {0, 5000, 9000}, "the newest stay, however old"


def test_all_together_take_at_most_a_multiple_of_the_newest_but_for_the_newest_few(tmp_path: Path) -> None:
    settings.init(tmp_path, keep_snapshots=2, max_snapshots_ratio=4)
    alike = {age_s: 10 for age_s in range(0, 3600, 600)}
    assert laid_out(tmp_path, alike) == {0, 600, 1200, 1800}
    assert laid_out(tmp_path, {**alike, 1800: 20}) == {0, 600, 1200}, "20 of 1800 s would be 50 of 40"
    assert laid_out(tmp_path, {**alike, 600: 100}) == {0, 600}, "kept, although they are more than four times 10"


def test_a_snapshot_that_another_process_reads_stays_and_its_reader_finishes(tmp_path: Path, make) -> None:
    settings.init(tmp_path, keep_snapshots=1, max_snapshots_ratio=1)
    publish(tmp_path, make, 0)
    code = (
        "import sys; from dflop.records import Correction; from dflop.store.reader import Reader\n"
        "with Reader(sys.argv[1]) as reader:\n"
        "    print(reader.seq, flush=True); sys.stdin.readline(); print(len(reader.records(Correction)))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reading:
        assert reading.stdout is not None
        assert reading.stdout.readline() == "1\n"
        for step in range(1, 6):
            publish(tmp_path, make, step)
        assert snapshots(tmp_path) == ["dflop-000001.duckdb", "dflop-000006.duckdb"]
        assert reading.communicate("\n")[0] == "1\n"
    publish(tmp_path, make, 6)
    assert snapshots(tmp_path) == ["dflop-000007.duckdb"]


def test_rounds_publish_when_a_snapshot_is_due_and_for_a_decision(tmp_path: Path, make, monkeypatch) -> None:
    now_s = [1e9]
    monkeypatch.setattr(retention, "BYTES_PER_S", 1e-9)  # any store is large
    monkeypatch.setattr(snapshot.time, "time", lambda: now_s[0])

    def after(wait_s: float, *records: Any) -> int:
        now_s[0] += wait_s
        write(tmp_path, *records)
        return ingest(tmp_path, is_urgent=False).snapshot_seq

    assert after(0, make.correction(0)) == 1, "the first"
    assert after(20, make.correction(1)) == 1
    assert len(stored(tmp_path)) == 1
    assert after(20, DECISION) == 2
    assert len(stored(tmp_path)) == 2, "all that was waiting came with the decision"
    assert after(20, make.correction(2)) == 2
    assert after(retention.PUBLISH_EVERY_S - 30, make.correction(3)) == 2
    assert after(10, make.correction(4)) == 3
    assert after(20, make.correction(5)) == 3
    assert after(-1000, make.correction(6)) == 4, "the clock of another node is behind"
    assert after(20, make.correction(7)) == 4
    (tmp_path / snapshot.read_current(tmp_path).file).unlink()
    assert after(20, make.correction(8)) == 5, "readers have none"
    write(tmp_path, make.correction(9))
    assert ingest(tmp_path).snapshot_seq == 6
    assert len(stored(tmp_path)) == 10


def test_a_disk_full_of_snapshots_has_room_for_the_next_one(tmp_path: Path, make, monkeypatch) -> None:
    for step in range(4):
        publish(tmp_path, make, step)
    settings.init(tmp_path, keep_snapshots=1, max_snapshots_ratio=1)
    copy = snapshot.copy_database

    def full(con: duckdb.DuckDBPyConnection, path: Path) -> None:
        if len(snapshots(tmp_path)) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        copy(con, path)

    monkeypatch.setattr(snapshot, "copy_database", full)
    publish(tmp_path, make, 4)
    assert snapshots(tmp_path) == ["dflop-000005.duckdb"]
    assert len(stored(tmp_path)) == 5


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


def test_an_empty_store_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no snapshot yet"):
        snapshot.open_current(tmp_path)


def _as_folder(path: Path, _text: bytes) -> None:
    path.unlink()
    path.mkdir()


def _as_link(path: Path, _text: bytes) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path, _: path.write_bytes(b""), "CURRENT is damaged: Expecting value"),
        (lambda path, text: path.write_bytes(text[: len(text) // 2]), "CURRENT is damaged"),
        (lambda path, text: path.write_bytes(b"\xff" + bytes(len(text))), "CURRENT is damaged"),
        (lambda path, _: path.write_bytes(b"[1]"), "CURRENT is damaged"),
        (lambda path, text: path.write_bytes(text.replace(b"snapshots/dflop", b"../../dflop")), "do not match"),
        (lambda path, text: path.write_bytes(text.replace(b'"seq": 1', b'"seq": 2')), "do not match"),
        (lambda path, text: path.write_bytes(text.replace(b'"seq": 1', b'"seq": ' + b"9" * 30)), "do not match"),
        (_as_folder, "not a file"),
        (_as_link, "not a file"),
        (lambda path, _: path.unlink(), "CURRENT was lost"),
    ],
)  # fmt: skip
def test_recovery_says_what_takes_the_place_of_a_damaged_current(tmp_path: Path, make, damage, words) -> None:
    publish(tmp_path, make)
    write(tmp_path, make.correction(1))
    damage(tmp_path / "CURRENT", (tmp_path / "CURRENT").read_bytes())
    with pytest.raises(StoreError) as error:
        snapshot.open_current(tmp_path)
    assert "dflop store ingest" in error.value.hint
    said: list[str] = []
    recover = rebuild if "lost" in words else ingest
    seq = recover(tmp_path, said.append).snapshot_seq
    assert [words in line for line in said if f"snapshot {seq}, a new copy of the live database" in line] == [True]
    assert sorted(c.effective_step for c in stored(tmp_path)) == [0, 1]


def test_ingesting_replaces_a_damaged_snapshot_although_nothing_is_new(tmp_path: Path, make) -> None:
    publish(tmp_path, make)
    for seq, damage in enumerate(("lost", "cut", "emptied", "overwritten"), 1):
        path = tmp_path / "snapshots" / f"dflop-{seq:06d}.duckdb"
        path.chmod(0o644)
        if damage == "lost":
            path.unlink()
            with pytest.raises(StoreError, match="cannot open snapshot 1"):
                snapshot.open_current(tmp_path)
        elif damage == "overwritten":
            with path.open("r+b") as file:
                file.write(bytes(range(256)) * 16)
        else:
            os.truncate(path, 0 if damage == "emptied" else path.stat().st_size // 2)
        said: list[str] = []
        assert ingest(tmp_path, said.append).snapshot_seq == seq + 1, damage
        assert any(line.startswith(f"snapshot {seq} ") and f"; snapshot {seq + 1}, " in line for line in said), said
        assert stored(tmp_path) == [make.correction()]
    assert ingest(tmp_path).snapshot_seq == 5
