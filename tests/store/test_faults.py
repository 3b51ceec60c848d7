"""Processes that are killed at the worst moments, and ingesters that meet."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dflop.records import Correction
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.spool import SpoolWriter, list_files

KILL = """
import os, signal, sys
from pathlib import Path
from dflop.store import durable, ingest, live, snapshot, spool
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
ingest.BATCH_FILES = 2
{trap}
ingest.ingest(root)
"""


def stored_steps(root: Path) -> list[int]:
    with Reader(root) as reader:
        return [row.effective_step for row in reader.records(Correction)]


@pytest.mark.parametrize(
    "trap",
    [
        "os.link = die",
        "os.link = after(os.link)",
        "durable.fsync_folder = die",
        "spool.encode = die",
        "os.fsync = after(os.fsync)",
    ],
)
def test_a_killed_writer_loses_nothing_it_acknowledged(tmp_path: Path, python, trap: str) -> None:
    done = python(KILL + WRITE.format(trap=trap), tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    acknowledged = int(done.stdout.split()[-1])
    assert ingest(tmp_path).num_quarantined_files == 0
    steps = stored_steps(tmp_path)
    assert acknowledged == 20
    assert steps[:acknowledged] == list(range(acknowledged))
    assert len(steps) in (20, 30)  # a file is whole or absent


@pytest.mark.parametrize(
    "trap",
    [
        "ingest._insert_table = after(ingest._insert_table)",
        "live.touch = die",
        "ingest._verify = die",
        "ingest._quarantine = die",
        "ingest._quarantine = after(ingest._quarantine)",
        "snapshot.publish_if_stale = die",
        "snapshot._copy = after(snapshot._copy)",
        "os.rename = after(os.rename)",
        "durable.replace = after(durable.replace)",
        "snapshot._retain = die",
    ],
)
def test_a_killed_ingester_loses_nothing_and_repeats_nothing(tmp_path: Path, python, make, trap: str) -> None:
    for step in range(5):
        with SpoolWriter(tmp_path, "run", "p") as writer:
            writer.append(make.correction(step))
    bad = tmp_path / "spool/correction/run/a-000000.parquet"
    bad.write_bytes(b"")
    done = python(KILL + INGEST.format(trap=trap), tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    ingest(tmp_path)
    assert stored_steps(tmp_path) == list(range(5))
    assert len(list(list_files(tmp_path))) == 5
    assert not [name for name in os.listdir(tmp_path / "snapshots") if name.startswith(".tmp-")]
    assert os.readlink(tmp_path / "current.duckdb").removeprefix("snapshots/") in os.listdir(tmp_path / "snapshots")


def test_ingesters_and_writers_that_meet_store_every_row_once(tmp_path: Path, python) -> None:
    write = KILL + (
        "with spool.SpoolWriter(root, 'run', sys.argv[2], flush_rows=5) as writer:\n"
        "    for step in range(50): writer.append(Correction('run', step, 'llm', sys.argv[2], 1.0, 0.1, 1, 0.0))\n"
    )
    writers = [python(write, tmp_path, f"p{i}", blocking=False) for i in range(2)]
    ingesters = [python(KILL + "ingest.ingest(root)", tmp_path, blocking=False) for _ in range(3)]
    for process in (*writers, *ingesters):
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    ingest(tmp_path)
    with Reader(tmp_path) as reader:
        rows = sorted((row.table_id, row.effective_step) for row in reader.records(Correction))
    assert rows == [(f"p{i}", step) for i in range(2) for step in range(50)]
