"""Faults on purpose: kills at the worst moments, ingesters that meet, forks, backlogs.

The faults a store must survive, and the tests that make them happen:

    F1   kill -9 of a writer                 test_a_killed_writer_loses_nothing_it_acknowledged, test_campaign.py
    F2   kill -9 of the ingester             test_a_killed_ingester_loses_nothing_and_repeats_nothing, test_campaign.py
    F3   every file replayed                 test_every_file_replayed_twice_changes_nothing
    F4   same key, other content             test_other_content_under_an_ingested_name_is_quarantined (test_ingest.py)
    F5   truncated, empty, foreign files     test_bad_files_are_quarantined_and_neighbours_are_not (test_ingest.py)
    F6   two ingesters                       test_ingesters_and_writers_that_meet_store_every_row_once, test_lease.py,
                                             test_delayed_lock.py
    F7   open() of the live file             test_nothing_in_the_store_opens_the_live_file_but_duckdb
    F8   a swallowed exception, then COMMIT  test_a_swallowed_error_is_not_acknowledged
    F9   a reader across publishes and gc    test_a_reader_keeps_its_snapshot_while_others_are_published_and_collected
                                             (test_snapshot.py); ESTALE: needs a real NFS mount, not run
    F10  stale CURRENT                       test_a_stale_current_that_names_a_collected_file_is_read_again
                                             (test_snapshot.py); a real attribute cache: not run
    F11  full disk, used-up quota            test_full_disk.py on a real tmpfs; EDQUOT injected (test_spool.py)
    F12  no locks on the file system         test_a_file_system_without_locks_is_named (test_lease.py), injected; a real
                                             mount without locks: not run
    F13  live database lost                  test_a_rebuild_gives_everything_again (test_maintenance.py)
    F14  clocks that disagree                test_of_corrections_at_one_instant_the_order_is_total
    F15  another version of duckdb reads     test_curves_read_alike_in_every_client (test_cost_views.py)
    F16  a backlog of 10,000 files           test_a_backlog_of_ten_thousand_files_is_taken_whole
    F17  a reader opens during a publish     test_readers_that_open_during_publishes_see_whole_snapshots
    F18  fork after connect                  test_a_fork_under_an_open_database_harms_neither_side
"""

import ast
import contextlib
import os
import shutil
import signal
import threading
from pathlib import Path

import duckdb
import pytest

from dflop.errors import StoreError
from dflop.records import Correction
from dflop.store import live, schema, snapshot
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.spool import SpoolKey, encode, list_files
from tests.store.asking import fill, rows, stored, write

KILL = """
import os, signal, sys
from pathlib import Path
from dflop import files
from dflop.store import file_check, durable, ingest, live, publishes, quarantine, rollup, snapshot, spool
from dflop.records import Correction
root = Path(sys.argv[1])

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def after(function):
    def wrapped(*args, **kwargs):
        function(*args, **kwargs)
        die()
    return wrapped
"""

WRITE = """
writer = spool.SpoolWriter(root, "run", "p", flush_rows=10)
for step in range(1000):
    if step == 25:
        {trap}
    writer.append(Correction("run", step, "llm", "t", 1.0, 0.1, 1, 0.0))
    print(writer.num_acknowledged, flush=True)
"""

INGEST = """
file_check.BATCH_FILES = 2
{trap}
ingest.ingest(root)
"""


def stored_steps(root: Path) -> list[int]:
    return [row.effective_step for row in stored(root)]


@pytest.mark.parametrize(
    "trap",
    ["os.link = die", "files.fsync = die", "spool.encode = die", "os.link = after(os.link)",
     "os.fsync = after(os.fsync)"],
)  # fmt: skip
def test_a_killed_writer_loses_nothing_it_acknowledged(tmp_path: Path, python, trap: str) -> None:
    printed = python(KILL + WRITE.format(trap=trap), tmp_path).ends(-signal.SIGKILL)
    acknowledged = int(printed.split()[-1])
    assert ingest(tmp_path).num_quarantined_files == 0
    steps = stored_steps(tmp_path)
    assert acknowledged == 20
    assert steps[:acknowledged] == list(range(acknowledged))
    assert len(steps) in (20, 30)  # a file is whole or absent


@pytest.mark.parametrize(
    "trap",
    [
        *(f"{call} = die" for call in (
            "live.touch", "quarantine.move", "snapshot.publish_if_stale", "publishes.append", "snapshot.expired",
        )),
        *(f"{call} = after({call})" for call in (
            "live.insert_table", "quarantine.move", "quarantine.write_reason", "rollup.refresh",
            "snapshot.copy_database", "publishes.append", "os.chmod",
        )),
    ],
)  # fmt: skip
def test_a_killed_ingester_loses_nothing_and_repeats_nothing(tmp_path: Path, python, make, trap: str) -> None:
    for step in range(5):
        write(tmp_path, make.correction(step))
    bad = tmp_path / "spool/correction/run/a-000000.parquet"
    bad.write_bytes(b"")
    if trap == "live.touch = die":  # while a new database gets its tables
        shutil.rmtree(tmp_path / "live")
    python(KILL + INGEST.format(trap=trap), tmp_path).ends(-signal.SIGKILL)
    ingest(tmp_path)
    assert stored_steps(tmp_path) == list(range(5))
    assert len(list(list_files(tmp_path))) == 5
    assert not [name for name in os.listdir(tmp_path / "snapshots") if name.startswith(".tmp-")]
    assert os.readlink(tmp_path / "current.duckdb").removeprefix("snapshots/") in os.listdir(tmp_path / "snapshots")


def test_ingesters_and_writers_that_meet_store_every_row_once(tmp_path: Path, python) -> None:
    code = KILL + (
        "with spool.SpoolWriter(root, 'run', sys.argv[2], flush_rows=5) as writer:\n"
        "    for step in range(50): writer.append(Correction('run', step, 'llm', sys.argv[2], 1.0, 0.1, 1, 0.0))\n"
    )
    writers = [python(code, tmp_path, f"p{i}") for i in range(2)]
    ingesters = [python(KILL + "ingest.ingest(root)", tmp_path) for _ in range(2)]
    for process in (*writers, *ingesters):
        process.ends()
    ingest(tmp_path)
    rows = sorted((row.table_id, row.effective_step) for row in stored(tmp_path))
    assert rows == [(f"p{i}", step) for i in range(2) for step in range(50)]


def test_every_file_replayed_twice_changes_nothing(tmp_path: Path, make) -> None:
    for step in range(20):
        write(tmp_path, make.correction(step), producer=f"p{step % 3}")
    ingest(tmp_path)
    for _ in range(2):
        # The whole spool restored from a copy: same bytes, new times.
        shutil.copytree(tmp_path / "spool", tmp_path / "copy", copy_function=shutil.copyfile)
        shutil.rmtree(tmp_path / "spool")
        (tmp_path / "copy").rename(tmp_path / "spool")
        report = ingest(tmp_path)
        assert (report.num_files, report.num_rows, report.num_quarantined_files, report.snapshot_seq) == (0, 0, 0, 1)
    assert sorted(stored_steps(tmp_path)) == list(range(20))


def test_nothing_in_the_store_opens_the_live_file_but_duckdb() -> None:
    """Closing any other descriptor of it would drop DuckDB's lock (POSIX); `live.py` has the only connect."""
    folder = Path(live.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            arguments = ast.unparse(node)
            if name == "duckdb.connect":
                assert path.name == "live.py" or "read_only=True" in arguments, f"{path.name}:{node.lineno}"
            opens = name in ("open", "os.open") or name.endswith((".open", ".read_bytes", ".read_text", ".copyfile"))
            if opens:
                assert "live" not in arguments, f"{path.name}:{node.lineno}: {arguments}"


def test_a_swallowed_error_is_not_acknowledged(tmp_path: Path, make, monkeypatch: pytest.MonkeyPatch) -> None:
    """DuckDB answers COMMIT with success after a failed statement, and commits nothing."""
    write(tmp_path, make.correction(0))
    insert = live.insert_table

    def swallow(con, name, rows):
        insert(con, name, rows)
        with contextlib.suppress(duckdb.Error):
            con.execute("insert into store_meta values ('duckdb_version', 'twice'), ('duckdb_version', 'twice')")

    with monkeypatch.context() as careless:
        careless.setattr(live, "insert_table", swallow)
        with pytest.raises(StoreError, match="ingest failed"):
            ingest(tmp_path)
    assert ingest(tmp_path).num_rows == 1
    assert stored_steps(tmp_path) == [0]


def test_of_corrections_at_one_instant_the_order_is_total(tmp_path: Path, make) -> None:
    """Clocks of nodes disagree: equal times are told apart by step, run, producer and file, in any order of arrival."""
    factors = {"a": 1.1, "b": 1.2}
    for forth, back in (("a", "b"), ("b", "a")):
        for module, producer in (("llm", forth), ("vision", back)):
            write(tmp_path, make.correction(5, factors[producer], module=module), producer=producer)
        ingest(tmp_path)
    assert rows(tmp_path, "select factor from v_correction_latest") == [{"factor": 1.2}] * 2


@pytest.mark.lane("instances")
def test_a_backlog_of_ten_thousand_files_is_taken_whole(tmp_path: Path, make) -> None:
    table = schema.to_table(Correction, [make.correction(step) for step in range(3)])
    for number in range(10_000):
        key = SpoolKey("correction", f"run{number % 7}", f"p{number % 11}", number)
        path = tmp_path / "spool" / key.relative_path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(key, table) if number != 5000 else b"one bad apple")
    report = ingest(tmp_path)
    assert (report.num_files, report.num_rows, report.num_quarantined_files) == (9_999, 29_997, 1)
    assert ingest(tmp_path).num_files == 0


def test_readers_that_open_during_publishes_see_whole_snapshots(tmp_path: Path, make) -> None:
    """Every snapshot adds one row: a reader must find exactly as many as its number says."""
    fill(tmp_path, make.correction(0))
    seen: list[tuple[int, int]] = []
    errors: list[Exception] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                with Reader(tmp_path) as reader:
                    seen.append((reader.seq, len(reader.records(Correction))))
        except Exception as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(1, 4):
        fill(tmp_path, make.correction(step))
    done.set()
    reader.join()
    assert errors == []
    assert all(seq == num_rows for seq, num_rows in seen)
    assert len({seq for seq, _ in seen}) > 1


FORK = """
with live.open_live(root) as (con, _):
    with live.transaction(con):
        con.execute("insert into store_meta values ('before', 'fork')")
    child = os.fork()
    if child == 0:
        os._exit(0)  # what multiprocessing's children do; the database's threads do not exist here
    os.waitpid(child, 0)
    with live.transaction(con):
        con.execute("insert into store_meta values ('after', 'fork')")
ingest.ingest(root)
with snapshot.open_current(root)[0] as con:
    print(con.execute("select count(*) from store_meta where value = 'fork'").fetchone()[0])
"""


def test_a_fork_under_an_open_database_harms_neither_side(tmp_path: Path, python, make) -> None:
    write(tmp_path, make.correction(0))
    assert python(KILL + FORK, tmp_path).ends() == "2\n"
    assert snapshot.read_current(tmp_path).seq == 1
