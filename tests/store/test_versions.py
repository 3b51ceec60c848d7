"""Other versions of duckdb open our snapshots: what a person's older shell and a colleague's newer one will do.

`make clients` installs them beside the environment; nothing else uses them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.asking import VERSIONS, ask_client, fill

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


@pytest.mark.parametrize("version", VERSIONS)
def test_a_snapshot_opens_in_every_client_in_use(tmp_path: Path, make, version: str) -> None:
    fill(tmp_path, make.correction(0, factor=1.5), make.run(), make.observation(0))
    found = ask_client(version, ASK, tmp_path)
    assert found.pop("comment")
    assert found == {"rows": 1, "view": 1.5, "summary": 1, "macro": 0}
