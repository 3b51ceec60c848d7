"""Who drives a run: one process at a time, known by host, pid and since when.

    <run>/driver.lock               flock; decisive on one machine, released by the kernel whatever kills its holder
    <run>/driver/<epoch>.json       numbered claims with a heartbeat, for drivers on different nodes (`store/lease.py`)

A driver that was killed is replaced at once on its own machine and after `LEASE_S` of silence elsewhere. Jobs know
nothing of this: they outlive their driver, and the next one adopts them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dflop.errors import LaunchError, StoreError
from dflop.jobs.rundir import RunDir
from dflop.store.lease import Claim, Lease, newest_claim

LEASE_S = 60.0
"""A driver on another node that was silent for so long is dead; it speaks six times as often."""
FOLDER, LOCK = "driver", "driver.lock"
_LOOK_S = 1.0
"""How long somebody who only looks may hold the lock, at most."""
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class Driver:
    """The process that drives a run."""

    host: str
    pid: int
    since: str
    """UTC, `2026-11-20T12:00:00Z`."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


def driver_of(run: RunDir) -> Driver | None:
    """Who drives a run now, or None."""
    claim = newest_claim(run.path / FOLDER)
    if claim is None or not _is_alive(run, claim):
        return None
    return Driver(claim.host, claim.pid, claim.since)


def check_free(run: RunDir) -> None:
    """Refuse a run that somebody drives.

    Raises:
        LaunchError: naming who does.
    """
    if (driver := driver_of(run)) is not None:
        raise _refusal(run, driver)


@contextlib.contextmanager
def drive_alone(run: RunDir) -> Iterator[Callable[[], None]]:
    """Be the driver of a run for the length of the block.

    Yields:
        Raises a LaunchError when another node has taken over, because this process gave no sign of life for too long;
        to be called before anything is submitted.

    Raises:
        LaunchError: somebody else drives it, or files cannot be locked there.
    """
    path = run.path / LOCK
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _lock(fd, path, lambda: _refusal(run, driver_of(run)))
        lease = _lease(run)
        lease.__enter__()
        try:
            yield lambda: _check(run, lease)
        finally:
            # A full disk: the claim is then not released, but old, before anybody else can need it.
            with contextlib.suppress(OSError):
                lease.__exit__(None, None, None)
    finally:
        os.close(fd)  # releases the lock


def _lease(run: RunDir) -> Lease:
    try:
        return Lease(run.path, lease_s=LEASE_S, timeout_s=0.0, name=FOLDER)
    except StoreError:
        raise _refusal(run, driver_of(run)) from None
    except OSError as error:
        raise LaunchError(f"cannot note who drives the run: {error.strerror}", where=str(run.path / FOLDER)) from error


def _check(run: RunDir, lease: Lease) -> None:
    try:
        lease.check()
    except StoreError:
        raise LaunchError(
            f"run `{run.run_id}` is driven by somebody else by now: {driver_of(run) or 'who has ended, too'}",
            where=str(run.path),
            hint="this process was silent for too long; its jobs are followed by the other one",
        ) from None


def _is_alive(run: RunDir, claim: Claim) -> bool:
    if claim.is_released:
        return False
    if claim.is_of_this_machine:
        return _is_locked(run.path / LOCK)
    return claim.age_s <= LEASE_S


def _lock(fd: int, path: Path, refusal: Callable[[], LaunchError]) -> None:
    deadline_s = time.monotonic() + _LOOK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise refusal() from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise LaunchError(
                f"the file system cannot lock files ({error.strerror})",
                where=str(path),
                hint="put `runs` on a file system with flock (Lustre: mount with -o flock; NFS: v4)",
            ) from error
        time.sleep(0.05)


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _refusal(run: RunDir, driver: Driver | None) -> LaunchError:
    return LaunchError(
        f"run `{run.run_id}` is being driven by {driver or 'a process that has not written its name yet'}",
        where=str(run.path),
        hint="wait for it, or stop it: dflop cancel; a run beside it wants another `name` in its configuration",
    )
