"""Who drives a run: one process at a time, known by host, pid and since when.

    <run>/driver.lock               flock; decisive on one machine, released by the kernel whatever kills its holder
    <run>/driver/<epoch>.json       numbered claims with a heartbeat, for drivers on different nodes (`store/lease.py`)

A driver that was killed is replaced at once on its own machine and after `LEASE_S` of silence elsewhere, which whoever
wants to take over waits for: a controller job that is requeued on another node finds its own traces. Jobs know nothing
of this: they outlive their driver, and the next one adopts them.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dflop.errors import LaunchError, StoreError
from dflop.files import user_name
from dflop.run.directory import RunDir
from dflop.run.messages import Say
from dflop.store import lease
from dflop.store.lease import Claim, Lease, falls_silent, is_alive, newest_claim
from dflop.units import seconds

LEASE_S = 60.0
"""A driver on another node that was silent for so long is dead; it speaks six times as often."""
FOLDER, LOCK = "driver", "driver.lock"


def driver_of(run: RunDir) -> Claim | None:
    """Who drives a run now, or None."""
    claim = newest_claim(run.path / FOLDER)
    return claim if claim is not None and is_alive(claim, run.path / LOCK, LEASE_S) else None


def check_free(run: RunDir, say: Say, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Refuse a run that somebody drives.

    A driver on another node is waited for until it gives a sign of life, seconds, or has been silent for too long.

    Raises:
        LaunchError: naming who drives it.
    """
    driver, lock = driver_of(run), run.path / LOCK
    if driver is None:
        return
    if not driver.is_of_this_machine:
        ago = f"last heartbeat {seconds(driver.age_s)} ago"
        say(f"run {run.run_id} was driven by {driver}, {ago}; waiting for a heartbeat")
        if falls_silent(run.path / FOLDER, driver, lambda now: not is_alive(now, lock, LEASE_S), sleep):
            return
    raise _refusal(run, driver)


@contextlib.contextmanager
def drive_alone(run: RunDir, say: Say) -> Iterator[None]:
    """Be the driver of a run for the length of the block; a driver on another node may have to be waited for.

    Raises:
        LaunchError: somebody else drives it, or files cannot be locked there.
    """
    check_free(run, say)
    with locked(run.path / LOCK, lambda: _refusal(run, driver_of(run))):
        try:
            held = Lease(run.path, lease_s=LEASE_S, timeout_s=0.0, name=FOLDER)
        except StoreError:
            raise _refusal(run, driver_of(run)) from None
        except OSError as error:
            what = f"cannot record the driver of the run: {error.strerror}"
            raise LaunchError(what, where=str(run.path / FOLDER)) from error
        held.__enter__()
        try:
            yield
        finally:
            # A full disk: the claim is then not released, but old, before anybody else can need it.
            with contextlib.suppress(OSError):
                held.__exit__(None, None, None)


def refuse_if_taken_over(run: RunDir) -> None:
    """Stop a driver that another node has succeeded; to be called before anything is submitted.

    Raises:
        LaunchError: the newest claim is not this process's, because it gave no sign of life for too long.
    """
    claim = newest_claim(run.path / FOLDER)
    if claim is None or (claim.is_of_this_machine and claim.pid == os.getpid()):
        return
    raise LaunchError(
        f"run `{run.run_id}` now has another driver: {driver_of(run) or 'which has also ended'}",
        where=str(run.path),
        hint="this process sent no heartbeat for too long; the other driver follows its jobs",
    )


def locked(
    path: Path, refusal: Callable[[], LaunchError], timeout_s: float = 1.0
) -> contextlib.AbstractContextManager[None]:
    """Holds a lock file of the user's own for the length of a block; who only looks holds it for less than a second.

    Raises:
        LaunchError: `refusal`, where somebody else holds it for too long; the file is another user's or a symbolic
            link, or files cannot be locked there.
    """
    fd = _open_own(path)
    return lease.locked(
        fd, refusal, lambda what, hint: LaunchError(what, where=str(path), hint=f"put `runs` {hint}"), timeout_s
    )


def _open_own(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        facts, problem = os.fstat(fd), ""
    except OSError as error:
        fd, problem = -1, error.strerror or str(error)
        if not os.path.lexists(path):
            hint = f"the folder belongs to {user_name(os.stat(path.parent).st_uid)}; name one that you may write to"
            raise LaunchError(f"cannot make the lock file: {problem}", where=str(path), hint=hint) from None
        facts = os.lstat(path)
    if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and not problem:
        return fd
    if fd >= 0:
        os.close(fd)
    kind = "file" if stat.S_ISREG(facts.st_mode) else "symbolic link" if stat.S_ISLNK(facts.st_mode) else "special file"
    what = f"cannot use the lock file, a {kind} of {user_name(facts.st_uid)}{f': {problem}' * bool(problem)}"
    raise LaunchError(what, where=str(path), hint="remove it, or ask its owner to")


def _refusal(run: RunDir, driver: Claim | None) -> LaunchError:
    return LaunchError(
        f"run `{run.run_id}` already has a driver: {driver or 'a process that has not registered yet'}",
        where=str(run.path),
        hint="wait for it, or stop it: dflop cancel; for a second run set another `name` in its configuration",
    )
