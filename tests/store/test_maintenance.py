"""Rebuild, verify, compact, gc: whatever is lost or tidied up, the rows stay the rows."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest

from dflop import files
from dflop.errors import ConfigError, StoreError
from dflop.store import archive, live, settings, snapshot
from dflop.store.ingest import ingest
from dflop.store.maintenance import compact, gc
from dflop.store.rebuild import rebuild, rebuild_snapshot, verify
from dflop.store.spool import list_files
from tests.store.asking import begin, fill, stored, write


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, make) -> Path:
    """Two snapshots, several files of two runs and kinds, NaN inside, one quarantined file."""
    root = tmp_path_factory.mktemp("filled") / "store"
    for step in range(6):
        write(root, make.correction(step), producer=f"p{step % 2}")
        write(root, make.observation(step, loss=float("nan")), run_id="run/compare")
    ingest(root)
    bad = root / "spool/correction/run/bad-000000.parquet"
    bad.write_bytes(b"not parquet")
    for step in range(6, 10):
        write(root, make.correction(step), producer=f"p{step % 2}")
    ingest(root)
    return root


@pytest.fixture
def store(filled: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(filled, tmp_path / "store", symlinks=True))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made again begins as `write` does."""
    connect = live.connect
    monkeypatch.setattr(live, "connect", lambda path, *say: (begin(path), connect(path, *say))[1])


def content(root: Path) -> dict[str, list[Any]]:
    """Everything a reader can see but when it was ingested, by table."""
    con, _ = snapshot.open_current(root)
    with con:
        tables = [row[0] for row in con.execute("select table_name from duckdb_tables()").fetchall()]
        books = {"store_meta", "schema_migration", "archive_manifest"}
        found = {}
        for table in sorted(set(tables) - books):
            left_out = "exclude (ingested_at_s)" if table == "ingest_manifest" else ""
            rows = con.execute(f'select * {left_out} from "{table}"').fetchall()
            if table.endswith("_rollup"):  # the order of a sum, and with it the last digit, is DuckDB's choice
                rows = [tuple(round(x, 9) if isinstance(x, float) else x for x in row) for row in rows]
            found[table] = sorted(map(repr, rows))
        return found


def steps(root: Path) -> list[int]:
    return sorted(c.effective_step for c in stored(root))


def test_a_rebuild_gives_everything_again(store: Path) -> None:
    """Over a damaged database that left a log; that of a database that is lost follows a compaction below."""
    before = content(store)
    (store / "live/dflop.duckdb").write_bytes(b"rubbish" * 10_000)
    (store / "live/dflop.duckdb.wal").write_bytes(b"rubbish" * 100)
    with pytest.raises(StoreError, match="cannot open the live database") as error:
        ingest(store)
    assert "dflop store rebuild" in error.value.hint
    report = rebuild(store)
    assert (report.num_files, report.num_rows, report.snapshot_seq) == (16, 16, 3)
    after = content(store)
    assert {**after, "publish_log": after["publish_log"][:2]} == before
    assert len(after["file_quarantine"]) == 1
    assert ingest(store).num_files == 0


def test_a_failed_rebuild_leaves_the_old_database(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (store / "live/dflop.duckdb").read_bytes()

    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(live, "insert_table", full)
        with pytest.raises(StoreError, match="rebuild failed"):
            rebuild(store)
    assert (store / "live/dflop.duckdb").read_bytes() == before
    assert os.listdir(store / "live") == ["dflop.duckdb"]


def test_a_snapshot_can_be_made_again_after_everything_but_the_files_is_gone(store: Path, tmp_path: Path) -> None:
    shutil.rmtree(store / "live")
    shutil.rmtree(store / "snapshots")
    (store / "CURRENT").unlink()
    output = tmp_path / "out/one.duckdb"
    report = rebuild_snapshot(store, 1, output)
    assert (report.num_files, report.snapshot_seq) == (12, 1)
    with duckdb.connect(str(output), read_only=True) as con:
        found = con.execute("select effective_step from correction order by all").fetchall()
        assert con.execute("select count(*) from step_observation").fetchone() == (6,)
    assert [row[0] for row in found] == list(range(6))
    assert output.stat().st_mode & 0o777 == 0o444
    assert os.listdir(output.parent) == ["one.duckdb"]
    assert not (store / "live").exists()  # a reproduction changes nothing in the store


def test_a_snapshot_that_cannot_be_made_again_is_refused(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="snapshot 9 is not in the publish log, which knows 1 to 2"):
        rebuild_snapshot(store, 9, tmp_path / "x.duckdb")
    (tmp_path / "y.duckdb").touch()
    with pytest.raises(ConfigError, match="exists"):
        rebuild_snapshot(store, 1, tmp_path / "y.duckdb")
    next((store / "spool/correction/run").glob("p0-*")).unlink()
    with pytest.raises(StoreError, match="held 12 files, the store still has 11"):
        rebuild_snapshot(store, 1, tmp_path / "x.duckdb")
    assert not (tmp_path / "x.duckdb").exists()


def test_a_publish_that_died_half_way_is_in_the_log_of_the_next(store: Path, make, monkeypatch, tmp_path: Path) -> None:
    before = snapshot.read_current(store)
    write(store, make.correction(50))

    def full(path: Path) -> None:
        if path.parent.name == "snapshots":
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(files, "fsync", full)
        with pytest.raises(StoreError, match="No space left"):
            ingest(store)
    assert snapshot.read_current(store) == before
    assert ingest(store).snapshot_seq == 4  # a number is never used twice, not even by a publish that died
    assert sorted(os.listdir(store / "snapshots")) == [f"dflop-{seq:06d}.duckdb" for seq in (1, 2, 4)]
    rebuild_snapshot(store, 4, tmp_path / "four.duckdb")
    with duckdb.connect(str(tmp_path / "four.duckdb"), read_only=True) as con:
        assert con.execute("select max(effective_step) from correction").fetchone() == (50,)


def test_verify_names_every_file_that_differs(store: Path) -> None:
    folder = store / "spool/correction/run"
    with live.open_live(store) as (con, _):  # steps 2 to 5 are in p0-000001, p1-000001, p0-000002, p1-000002
        con.execute("update correction set factor = factor + 1 where effective_step = 3")
        con.execute("insert into correction from correction where effective_step = 4")
        con.execute("delete from correction where effective_step = 5")
    (folder / "p0-000000.parquet").unlink()
    path = folder / "p1-000000.parquet"
    stat, data = path.stat(), bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    path = store / snapshot.read_current(store).file
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"x")
    problems = verify(store).problems
    for words in (
        "is not what was published",
        *(f"{name}.parquet has other rows in table correction than a rebuild"
          for name in ("p1-000001", "p0-000002", "p1-000002")),
        "p0-000000.parquet is in the database, but neither in the spool nor in the archive",
        "p1-000000.parquet is not the file that was ingested: another hash",
    ):  # fmt: skip
        assert any(words in problem for problem in problems), words
    assert not any("p0-000001" in problem for problem in problems)


def test_verify_forgives_only_the_last_digits_of_a_roll_up(tmp_path: Path, make) -> None:
    changes = {
        "alike": "update step_rollup set step_s = step_s * (1 + 1e-14)",
        "digits": "update step_rollup set step_s = step_s + 1e-6",
        "no number": "update step_rollup set loss = 'nan'",
        "twice": "insert into step_rollup from step_rollup",
        "gone": "delete from step_rollup",
    }
    fill(tmp_path, *(make.observation(run_id=run_id) for run_id in changes))
    with live.open_live(tmp_path) as (con, _):
        for run_id, statement in changes.items():
            con.execute(f"{statement} where run_id = '{run_id}'")
    differing = {f"{run_id} has another step_rollup than a rebuild" for run_id in changes if run_id != "alike"}
    assert set(verify(tmp_path).problems) == differing


def make_old(root: Path) -> None:
    then_ns = time.time_ns() - int(2 * 86_400e9)
    for _, path in list_files(root):
        os.utime(path, ns=(then_ns, then_ns))


def test_compacting_changes_no_row_and_survives_a_rebuild(store: Path, make) -> None:
    assert compact(store, min_files=2).num_files_before == 0, "young files"
    make_old(store)
    assert compact(store, min_files=100).num_files_before == 0, "few files"
    ingest(store)
    before = content(store)
    planned = compact(store, min_files=3, dry_run=True)
    assert len(list(list_files(store))) == 16
    report = compact(store, min_files=3)
    assert (report.num_runs, report.num_files_before, report.num_files_after) == (2, 16, 2)
    assert planned.num_files_before == report.num_files_before
    assert list(list_files(store)) == []
    assert [a.name for a in archive.list_archive(store)] == [
        "correction/run/000000.parquet", "step_observation/run/compare/000000.parquet",
    ]  # fmt: skip
    table = pq.ParquetFile(store / "archive/step_observation/run/compare/000000.parquet").read()
    assert table["_seq"].to_pylist() == list(range(6)), "records keep their file"
    verified = verify(store)
    assert (verified.problems, verified.num_files, verified.num_rows) == ((), 16, 16)
    shutil.rmtree(store / "live")
    rebuild(store)
    after = content(store)
    # make_old() changed file times, which ingest noted when it hashed the files again: contents are what counts.
    for table in ("correction", "step_observation", "file_quarantine"):
        assert after[table] == before[table]
    assert ingest(store).num_files == 0

    write(store, make.correction(99), producer="p0")
    assert [name for name, _ in list_files(store)] == ["correction/run/p0-000005.parquet"], "it goes on counting"
    assert ingest(store).num_quarantined_files == 0
    assert steps(store) == [*range(10), 99]


@pytest.mark.parametrize("moment", ["note", "unlink"])
def test_a_compaction_that_is_killed_loses_and_repeats_nothing(store: Path, moment: str, monkeypatch) -> None:
    make_old(store)

    def die(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(archive if moment == "note" else Path, moment, die)
        with pytest.raises(KeyboardInterrupt):
            compact(store, min_files=3)
    ingest(store)
    assert steps(store) == list(range(10))
    assert compact(store, min_files=3).num_files_before >= 6
    assert verify(store).problems == ()
    shutil.rmtree(store / "live")
    ingest(store)
    assert steps(store) == list(range(10))


def test_a_damaged_archive_stops_a_rebuild_and_says_which_file(store: Path) -> None:
    make_old(store)
    compact(store, min_files=3)
    path = store / "archive/correction/run/000000.parquet"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    shutil.rmtree(store / "live")
    with pytest.raises(StoreError, match="cannot read the compacted file") as error:
        rebuild(store)
    assert error.value.where == str(path)


def test_gc_removes_expired_snapshots_and_leftovers_and_nothing_else(store: Path, make) -> None:
    fill(store, make.correction(20))
    settings.init(store, keep_snapshots=1, grace_s=3600)
    old_s = time.time() - 100_000
    for path in (store / "snapshots").iterdir():
        os.utime(path, (old_s, old_s))
    old_tmp, young_tmp = (store / f"spool/correction/run/.tmp-host-1-{name}" for name in ("old", "young"))
    old_tmp.write_bytes(b"half a file")
    young_tmp.write_bytes(b"being written")
    os.utime(old_tmp, (old_s, old_s))
    before = content(store)
    planned = gc(store, dry_run=True)
    assert old_tmp.exists()
    done = gc(store)
    assert planned == done
    expected = {f"snapshots/dflop-{seq:06d}.duckdb" for seq in (1, 2)} | {str(old_tmp.relative_to(store))}
    assert set(done) == expected
    assert young_tmp.exists()
    assert content(store) == before
    assert gc(store) == {}
