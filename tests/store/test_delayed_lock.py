"""A lock that comes late, as over a network file system, while another process commits.

duckdb 2.0.0 reads the header of a database, then locks it, and does not read it again: a process whose lock is delayed
works from a header that somebody else has replaced meanwhile, and overwrites what they committed. The store's own
lock is taken before DuckDB sees the file. `strace` makes the delay real: it holds DuckDB's `fcntl` call back.
"""

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from dflop.records import Correction
from dflop.store import live
from dflop.store.ingest import ingest
from tests.launch.helpers import until
from tests.store.asking import fill, stored, write

DELAY_US = 1_500_000

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

INGEST = "import sys; from pathlib import Path; from dflop.store.ingest import ingest; ingest(Path(sys.argv[1]))"


def start_late(root: Path) -> subprocess.Popen[str]:
    """An ingester that is delayed whenever it locks the live database."""
    database = live.live_file(root)
    trace = ["-e", "trace=fcntl", "-e", f"inject=fcntl:delay_enter={DELAY_US}"]
    command = ["strace", "-f", "-o", f"{database}.trace", "-P", str(database), *trace, sys.executable, "-c", INGEST]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
    return subprocess.Popen([*command, str(root)], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=120)
    if "PTRACE" in errors and "not permitted" in errors:
        pytest.skip("strace may not trace processes here")
    assert process.returncode == 0, errors


def test_an_ingester_whose_lock_is_late_overwrites_nothing(tmp_path: Path, make) -> None:
    def rows(producer: str, num_rows: int) -> list[Correction]:
        return [make.correction(step, table_id=producer) for step in range(num_rows)]

    fill(tmp_path, *rows("first", 10), producer="first")
    write(tmp_path, *rows("slow", 5000), producer="slow")
    slow = start_late(tmp_path)
    trace = Path(f"{live.live_file(tmp_path)}.trace")
    until(lambda: trace.exists() and "F_SETLK" in trace.read_text(), what="its first lock, or its being held")
    write(tmp_path, *rows("late", 5000), producer="late")
    ingest(tmp_path)  # waits for the store's lock, which the slow one took first
    finish(slow)
    assert Counter(c.table_id for c in stored(tmp_path)) == {"first": 10, "slow": 5000, "late": 5000}
    assert "DELAYED" in trace.read_text()
