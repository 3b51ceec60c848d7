"""What is said of a store: sound, broken in each of its parts, in use."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from dflop.doctor.finding import FAIL, OK, SKIP, WARN, Finding
from dflop.doctor.profile_store import profile_store
from dflop.store import live
from tests.store.asking import fill
from tests.store.conftest import Make


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("sound") / "store", Make.run())


@pytest.fixture
def store(sound: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(sound, tmp_path / "store", symlinks=True))


def of(root: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in profile_store(root)}


def overwrite(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(b"this is no database" * 1000)


def test_a_sound_store_is_only_looked_at_and_none_is_made(store, tmp_path):
    def contents() -> dict[Path, bytes]:
        return {p: p.read_bytes() for p in store.rglob("*") if p.is_file() and p.name != "ingest.lock"}

    before, found = contents(), of(store)
    assert contents() == before
    assert {finding.status for finding in found.values()} == {OK}
    assert found["snapshot"].detail.startswith("1, ")
    assert found["snapshot"].detail.endswith("rows of 1 files")
    assert found["lease"].detail.startswith("free; epoch ")
    assert found["room for snapshots"].detail.startswith("1 snapshots take ")
    assert found["spool"].detail == "nothing to ingest"
    (finding,) = profile_store(tmp_path / "none")
    assert finding.status == SKIP
    assert not (tmp_path / "none").exists()


def test_a_disk_without_room_for_the_next_snapshots_is_a_warning(store, monkeypatch):
    usage = shutil.disk_usage(store)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    found = of(store)["room for snapshots"]
    assert (found.status, found.detail.endswith("; 1000 B are free")) == (WARN, True), found
    assert "dflop store gc" in found.advice


def test_a_broken_snapshot_a_broken_database_and_damaged_small_files(store):
    overwrite(store / "snapshots" / "dflop-000001.duckdb")
    overwrite(store / "live" / "dflop.duckdb")
    found = of(store)
    assert found["snapshot"].status == found["live database"].status == FAIL
    assert "cannot open snapshot 1" in found["snapshot"].detail
    assert "dflop store ingest" in found["snapshot"].advice
    assert "cannot open the live database" in found["live database"].detail
    assert "dflop store rebuild" in found["live database"].advice
    assert found["spool"].status == SKIP
    (store / "CURRENT").write_text("{")
    (store / "store.json").write_text("{")
    claim = max((store / "INGEST.lease").glob("*.json"))
    claim.write_text("")
    found = of(store)
    assert found["snapshot"].detail.startswith("CURRENT is damaged")
    assert found["live database"].detail.startswith("not JSON")
    assert found["lease"].status == FAIL
    assert str(claim) in found["lease"].detail


def test_an_ingester_at_work_is_no_fault_and_a_claim_of_a_node_that_fell_silent_is_free(store):
    with live.hold(store):
        found = of(store)
    assert (found["live database"].status, found["lease"].status) == (OK, OK)
    assert f"process {os.getpid()}" in found["live database"].detail
    assert found["lease"].detail.startswith(f"held by process {os.getpid()} on ")
    claim = max((store / "INGEST.lease").glob("*.json"))
    content = json.loads(claim.read_text()) | {"is_released": False, "host": "node9"}
    claim.write_text(json.dumps(content))
    os.utime(claim, (time.time() - 1000,) * 2)
    assert "free: process" in of(store)["lease"].detail
    assert "on node9" in of(store)["lease"].detail
