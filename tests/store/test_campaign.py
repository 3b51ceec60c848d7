import json
import os
from collections import Counter
from pathlib import Path

import pytest

from dflop.records import Correction
from dflop.store.ingest import ingest
from dflop.store.rebuild import verify
from tests.forked import run_module
from tests.store.asking import stored
from tests.store.campaign import checksum
from tests.store.spooled import read_spool


@pytest.mark.parametrize(("num_kills", "num_producers"), [(4, 3), pytest.param(30, 8, marks=pytest.mark.lane("kills"))])
def test_kills_of_writers_and_ingesters_lose_repeat_and_tear_nothing(
    tmp_path: Path, num_kills: int, num_producers: int
) -> None:
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")  # shown when the test fails
    arguments = (str(tmp_path), *map(str, (seed, num_kills, num_producers)))
    done = run_module("tests.store.campaign", *arguments, cwd=Path.cwd(), env=os.environ, timeout_s=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"producer": num_kills, "ingester": num_kills}

    assert ingest(tmp_path).num_quarantined_files == 0
    found_rows = stored(tmp_path)
    found = Counter((row.table_id, row.effective_step) for row in found_rows)
    acknowledged = {
        (path.name, int(line))
        for path in (tmp_path / "acknowledged").iterdir()
        for line in path.read_text().splitlines()
    }
    assert len(acknowledged) > 30 * num_kills
    assert acknowledged - set(found) == set()  # none lost
    assert [key for key, count in found.items() if count > 1] == []  # none twice
    assert [row for row in found_rows if row.factor != checksum(row.effective_step, row.table_id)] == []  # none torn
    assert sorted(found_rows, key=repr) == sorted(read_spool(tmp_path, Correction), key=repr)
    assert verify(tmp_path).problems == ()
