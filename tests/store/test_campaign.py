from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from dflop.records import Correction
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.spool import read_spool
from dflop.store.verify import verify
from tests.store.campaign import checksum

HERE = Path(__file__).parent
NUM_KILLS = 30


@pytest.mark.lane("kills")
def test_thirty_kills_of_writers_and_ingesters_lose_repeat_and_tear_nothing(tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")  # shown when the test fails
    command = [sys.executable, str(HERE / "campaign.py"), str(tmp_path), str(seed), str(NUM_KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": "."})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"producer": NUM_KILLS, "ingester": NUM_KILLS}

    assert ingest(tmp_path).num_quarantined_files == 0
    with Reader(tmp_path) as reader:
        stored = reader.records(Correction)
    found = Counter((row.table_id, row.effective_step) for row in stored)
    acknowledged = {
        (path.name, int(line))
        for path in (tmp_path / "acknowledged").iterdir()
        for line in path.read_text().splitlines()
    }
    assert len(acknowledged) > 1000
    assert acknowledged - set(found) == set()  # none lost
    assert [key for key, count in found.items() if count > 1] == []  # none twice
    assert [row for row in stored if row.factor != checksum(row.effective_step, row.table_id)] == []  # none torn
    assert sorted(stored, key=repr) == sorted(read_spool(tmp_path, Correction), key=repr)
    assert verify(tmp_path).problems == ()
