"""Other versions of duckdb open our snapshots: what a person's older shell and a colleague's newer one will do.

`make clients` installs them beside the environment; nothing else uses them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflop.store.ingest import ingest
from dflop.store.spool import SpoolWriter

CLIENTS = Path(sys.prefix) / "clients"

ASK = """
import duckdb, json, sys
con = duckdb.connect(sys.argv[1], read_only=True)
one = lambda sql: con.execute(sql).fetchall()[0][0]
print(json.dumps({
    "version": duckdb.__version__,
    "rows": one("select count(*) from correction"),
    "view": one("select factor from v_correction_latest"),
    "summary": one("select count(*) from v_run_summary"),
    "macro": one("select count(*) from cost_estimate('none', 1, 2, 3)"),
    "comment": one("select comment from duckdb_tables() where table_name = 'plan'"),
}))
"""


@pytest.mark.parametrize("version", ["1.4", "1.5", "2.0"])
def test_a_snapshot_opens_in_every_client_in_use(tmp_path: Path, make, version: str) -> None:
    client = CLIENTS / version
    if not client.is_dir():
        pytest.skip(f"duckdb {version} is not installed beside the environment (make clients)")
    with SpoolWriter(tmp_path, "run", "p") as writer:
        writer.append(make.correction(0, factor=1.5))
        writer.append(make.run())
        writer.append(make.observation(0))
    ingest(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(client)}
    command = [sys.executable, "-c", ASK, str(tmp_path / "current.duckdb")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("version").startswith(version)
    assert found.pop("comment")
    assert found == {"rows": 1, "view": 1.5, "summary": 1, "macro": 0}
