"""Two nodes are two values of the machine's boot id: what the lease goes by."""

import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest

from dflop.errors import StoreError
from dflop.store import durable, lease, live, settings, snapshot
from dflop.store.ingest import ingest
from dflop.store.lease import Lease
from tests.store.asking import write


def take(root: Path, *, timeout_s: float = 0.0, lease_s: float = 60.0) -> Lease:
    return Lease(root, lease_s=lease_s, timeout_s=timeout_s)


@pytest.fixture
def on_node(monkeypatch: pytest.MonkeyPatch):
    return lambda name: monkeypatch.setattr(lease, "_boot_id", lambda: name)


def age(held: Lease, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(held._path(held.epoch), (then, then))


def test_epochs_only_rise_and_one_claim_is_kept(tmp_path: Path) -> None:
    epochs = []
    for _ in range(3):
        with take(tmp_path) as held:
            held.check()
            epochs.append(held.epoch)
    assert epochs == [1, 2, 3]
    assert os.listdir(tmp_path / "INGEST.lease") == ["000003.json"]


def test_a_live_claim_of_another_node_is_respected_and_named(tmp_path: Path, on_node) -> None:
    on_node("node-a")
    with take(tmp_path):
        on_node("node-b")
        with pytest.raises(StoreError, match=rf"another node is ingesting: epoch 1, process {os.getpid()}"):
            take(tmp_path)
    take(tmp_path)  # released


def test_anyone_may_look_who_holds_a_lease_and_how_old_his_last_sign_of_life_is(tmp_path: Path, on_node) -> None:
    folder = tmp_path / "other"
    assert lease.newest_claim(folder) is None
    on_node("node-a")
    held = Lease(tmp_path, lease_s=60.0, timeout_s=0.0, name="other")
    with held:
        age(held, 20)
        on_node("node-b")
        seen = lease.newest_claim(folder)
        assert seen is not None
        assert (seen.pid, seen.is_released, seen.is_of_this_machine) == (os.getpid(), False, False)
        assert 19 < seen.age_s < 30
        assert os.listdir(folder) == ["000001.json"], "looking leaves nothing"
        on_node("node-a")
        assert lease.newest_claim(folder).is_of_this_machine
    assert lease.newest_claim(folder).is_released
    assert not (tmp_path / lease.FOLDER).exists()


def test_a_waiting_node_gets_the_lease_when_it_is_released(tmp_path: Path, on_node) -> None:
    on_node("node-a")
    held = take(tmp_path).__enter__()
    on_node("node-b")
    threading.Timer(0.3, held.__exit__, (None, None, None)).start()
    assert take(tmp_path, timeout_s=10).epoch == 2


def test_a_killed_holder_of_this_machine_is_replaced_at_once(tmp_path: Path) -> None:
    take(tmp_path)  # never entered nor released: what kill -9 leaves
    assert take(tmp_path).epoch == 2


def test_a_silent_node_is_taken_over_and_then_fenced(tmp_path: Path, on_node) -> None:
    on_node("node-a")
    asleep = take(tmp_path)
    age(asleep, 61)
    on_node("node-b")
    with take(tmp_path) as successor:
        assert successor.epoch == 2
        with pytest.raises(StoreError, match="lost the ingest lease: epoch 2 has taken over from epoch 1"):
            asleep.check()
        asleep.__exit__(None, None, None) if asleep._heart.is_alive() else None
        successor.check()


def test_a_holder_that_works_long_keeps_its_claim_young(tmp_path: Path, on_node) -> None:
    on_node("node-a")
    with take(tmp_path, lease_s=0.6) as held:
        age(held, 100)
        deadline_s = time.monotonic() + 30
        while time.time() - held._path(1).stat().st_mtime > 50:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)


def test_of_many_nodes_that_race_for_an_expired_claim_each_epoch_goes_to_one(tmp_path: Path, on_node) -> None:
    on_node("node-a")
    age(take(tmp_path), 1000)
    on_node("node-b")
    won: list[int] = []
    barrier = threading.Barrier(8)

    def race() -> None:
        barrier.wait()
        won.append(take(tmp_path, timeout_s=30).epoch)  # one boot id: whoever comes later takes over from the winner

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(won)) == 8  # numbers may be left out, never given twice
    assert min(won) > 1


def test_a_fenced_ingester_commits_nothing_and_publishes_nothing(tmp_path: Path, make, monkeypatch) -> None:
    write(tmp_path, make.correction(0))
    insert = live.insert_table

    def insert_then_sleep(con, name, rows):
        insert(con, name, rows)
        # Meanwhile another node takes the claim for dead.
        folder = tmp_path / "INGEST.lease"
        durable.write_new(folder / "000099.json", json.dumps({"pid": 1, "host": "b", "since": "now"}).encode())

    with monkeypatch.context() as asleep:
        asleep.setattr(live, "insert_table", insert_then_sleep)
        asleep.setattr(durable, "write_new", _once(durable.write_new))
        with pytest.raises(StoreError, match="lost the ingest lease"):
            ingest(tmp_path)
    assert snapshot.read_current(tmp_path) is None
    (tmp_path / "INGEST.lease/000099.json").unlink()
    assert ingest(tmp_path).num_rows == 1


def _once(write):
    """Swallows the second write of the same file: the trap above fires once per table."""

    def wrapped(final, data):
        if not final.exists():
            write(final, data)

    return wrapped


def test_the_lease_time_is_a_setting_of_the_store(tmp_path: Path, on_node) -> None:
    settings.init(tmp_path, lease_s=30)
    on_node("node-a")
    age(take(tmp_path), 31)
    on_node("node-b")
    with live.hold(tmp_path, lock_timeout_s=0) as held:
        assert held.epoch == 2


def test_a_second_holder_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with (
        lease.exclusive(path, timeout_s=0),
        pytest.raises(StoreError, match=rf"process {os.getpid()} on .* since 20"),
        lease.exclusive(path, timeout_s=0),
    ):
        pass
    with lease.exclusive(path, timeout_s=0):
        pass


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(_fd: int, _flags: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(lease.fcntl, "flock", fail)
    with pytest.raises(StoreError, match="cannot lock files"), lease.exclusive(tmp_path / "lock", timeout_s=0):
        pass
