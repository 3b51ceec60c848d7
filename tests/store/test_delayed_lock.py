"""A lock that comes late, as over a network file system, while another process commits.

duckdb 2.0.0 reads the header of a database, then locks it, and does not read it again: a process whose lock is delayed
works from a header that somebody else has replaced meanwhile, and overwrites what they committed. The store's own
lock is taken before DuckDB sees the file. `strace` makes the delay real: it holds DuckDB's `fcntl` call back.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import duckdb
import pytest

from dflop.records import Correction
from dflop.store import live
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.spool import SpoolWriter

DELAY_US = 1_500_000

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

INGEST = "import sys; from pathlib import Path; from dflop.store.ingest import ingest; ingest(Path(sys.argv[1]))"
RAW = """
import duckdb, sys, time
for _ in range(200):
    try:
        con = duckdb.connect(sys.argv[1])
        break
    except duckdb.IOException:
        time.sleep(0.05)
con.execute("insert into t select range + ?::bigint from range(50000)", [sys.argv[2]])
con.close()
"""


def start(code: str, *args: object, delay_locks_of: Path | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    if delay_locks_of:
        trace = ["-e", "trace=fcntl", "-e", f"inject=fcntl:delay_enter={DELAY_US}"]
        command = ["strace", "-f", "-o", f"{delay_locks_of}.trace", "-P", str(delay_locks_of), *trace, *command]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=120)
    if "PTRACE" in errors and "not permitted" in errors:
        pytest.skip("strace may not trace processes here")
    assert process.returncode == 0, errors


def wait_for_delay(database: Path) -> None:
    """Until the slow process has opened the database: its trace file has the first lock call, or is being held."""
    deadline_s = time.monotonic() + 60
    while not Path(f"{database}.trace").exists() or "F_SETLK" not in Path(f"{database}.trace").read_text():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_an_ingester_whose_lock_is_late_overwrites_nothing(tmp_path: Path, make) -> None:
    def write(producer: str, num_rows: int) -> None:
        with SpoolWriter(tmp_path, "run", producer, flush_rows=5000) as writer:
            for step in range(num_rows):
                writer.append(make.correction(step, table_id=producer))

    write("first", 10)
    ingest(tmp_path)
    write("slow", 5000)
    slow = start(INGEST, tmp_path, delay_locks_of=live.live_file(tmp_path))
    wait_for_delay(live.live_file(tmp_path))
    write("late", 5000)
    finish(start(INGEST, tmp_path))  # waits for the store's lock, which the slow one took first
    finish(slow)
    with Reader(tmp_path) as reader:
        rows = [c.table_id for c in reader.records(Correction)]
    assert {name: rows.count(name) for name in ("first", "slow", "late")} == {"first": 10, "slow": 5000, "late": 5000}
    assert "DELAYED" in Path(f"{live.live_file(tmp_path)}.trace").read_text()


@pytest.mark.skipif(duckdb.__version__ != "2.0.0", reason="shows a fault of duckdb 2.0.0 (make test-duckdb2)")
def test_without_the_lock_committed_rows_are_lost(tmp_path: Path) -> None:
    """The control: what the test above would see if the store relied on DuckDB's lock alone."""
    database = tmp_path / "raw.duckdb"
    with duckdb.connect(str(database)) as con:
        con.execute("create table t (a bigint)")
    slow = start(RAW, database, 0, delay_locks_of=database)
    wait_for_delay(database)
    finish(start(RAW, database, 50_000))
    finish(slow)
    with duckdb.connect(str(database), read_only=True) as con:
        (kept,) = con.execute("select count(*) from t where a >= 50000").fetchall()[0]
    assert kept < 50_000
