"""Two nodes are two values of the machine's boot id, as in the tests of the lease."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dflop.errors import LaunchError
from dflop.run.directory import RunDir
from dflop.run.driver_lock import FOLDER, LEASE_S, check_free, drive_alone, driver_of, refuse_if_taken_over
from dflop.store import lease
from tests.jobs.made import make_run

ELSEWHERE = "another-boot"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path)


@pytest.fixture
def on_node(monkeypatch: pytest.MonkeyPatch):
    return lambda name: monkeypatch.setattr(lease, "_boot_id", lambda: name)


def claim(run: RunDir) -> Path:
    return max((run.path / FOLDER).iterdir())


def silent_for(run: RunDir, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(claim(run), (then, then))


def test_a_run_has_one_driver_and_it_is_known(run):
    assert driver_of(run) is None
    with drive_alone(run, print):
        refuse_if_taken_over(run)
        found = driver_of(run)
        assert found is not None
        assert (found.host, found.pid) == (socket.gethostname(), os.getpid())
        assert time.strptime(found.since, "%Y-%m-%dT%H:%M:%SZ")
        with pytest.raises(LaunchError, match=f"driver: process {os.getpid()} on {socket.gethostname()} since 20"):
            check_free(run, print)
        with pytest.raises(LaunchError, match="already has a driver"), drive_alone(run, print):
            pass
    assert driver_of(run) is None
    with drive_alone(run, print):
        pass


def test_a_driver_on_another_node_that_lives_is_heard_within_seconds(run, on_node):
    on_node(ELSEWHERE)
    with drive_alone(run, print):
        silent_for(run, 9)
        on_node("here")
        said: list[str] = []

        def beat(_seconds: float) -> None:
            os.utime(claim(run))

        with pytest.raises(LaunchError, match="already has a driver"):
            check_free(run, said.append, sleep=beat)
        assert "waiting for a heartbeat" in said[0]
        on_node(ELSEWHERE)


def test_a_driver_on_another_node_that_is_dead_is_waited_for_and_replaced(run, on_node, monkeypatch):
    on_node(ELSEWHERE)
    monkeypatch.setattr(lease.Lease, "__exit__", lambda *_: None)  # killed: it releases nothing
    with drive_alone(run, print):
        pass
    monkeypatch.undo()
    on_node("here")
    silent_for(run, LEASE_S - 20)
    assert driver_of(run) is not None, "it may live"
    waits = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        silent_for(run, LEASE_S - 20 + 10 * len(waits))

    check_free(run, print, sleep=wait)
    assert 1 <= len(waits) <= 4
    with drive_alone(run, print):
        pass


def test_whoever_slept_through_a_takeover_is_told(run, on_node):
    on_node(ELSEWHERE)
    with drive_alone(run, print):
        silent_for(run, LEASE_S + 1)
        on_node("here")
        # The mount's locks reach one node only.
        other = lease.Lease(run.path, lease_s=LEASE_S, timeout_s=0.0, name=FOLDER)
        with other:
            on_node(ELSEWHERE)
            with pytest.raises(LaunchError, match="now has another driver: process"):
                refuse_if_taken_over(run)
            on_node("here")
        on_node(ELSEWHERE)
        with pytest.raises(LaunchError, match="now has another driver: which has also ended"):
            refuse_if_taken_over(run)


def test_a_file_system_without_locks_and_a_full_disk_are_named_but_no_error_at_the_end(run, monkeypatch):
    def failing(number: int) -> Callable[..., None]:
        def fail(*_args: object) -> None:
            raise OSError(number, os.strerror(number))

        return fail

    for module, name, number, said in (
        (fcntl, "flock", errno.ENOLCK, "cannot lock files"),
        (lease.durable, "write_new", errno.ENOSPC, "cannot record the driver of the run: No space left"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, failing(number))
            with pytest.raises(LaunchError, match=said), drive_alone(run, print):
                pass
    with drive_alone(run, print):
        monkeypatch.setattr(lease.durable, "replace", failing(errno.ENOSPC))
    monkeypatch.undo()
    assert driver_of(run) is None, "the claim is not released, but the lock is"
    with drive_alone(run, print):
        pass
