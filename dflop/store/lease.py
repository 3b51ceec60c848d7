"""One ingester at a time: a file lock for this node, and a lease for nodes whose locks cannot be trusted.

DuckDB's own lock is taken after the header is read (2.0.0), so a process that opens the live file while another one
commits can overwrite acknowledged rows without an error. `flock`, taken before `connect` and held past `close`, closes
that window, and dies with its holder's process.

`flock` is decisive on one node. Across nodes it is only as good as the mount (NFS without a lock manager, Lustre with
`localflock`), so an ingester also claims the next epoch: `link()` lets exactly one process create a number, on NFS
too. A holder touches its claim while it works; a claim not touched for `lease_s` is taken over by the next epoch. Its
owner, if it was only asleep, finds the higher number when it checks before its next commit or publish, and stops
(fencing). Ages are differences of file times, so they are read off one clock, the file server's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dflop import files
from dflop.errors import DflopError, StoreError
from dflop.records import from_dict, parse_json, to_dict
from dflop.store import access, durable

LOCK_POLL_S, POLL_S, LOOK_S = 0.05, 0.2, 1.0
FOLDER = "INGEST.lease"


@dataclass(frozen=True, slots=True)
class Claim:
    """The process that holds a lock or a lease, as it has written itself down."""

    pid: int
    host: str
    since: str
    """UTC, `2026-11-20T12:00:00Z`."""
    boot_id: str = ""
    """Boot id of the kernel under which it was made."""
    is_released: bool = False
    job: str = ""
    """The job it is a process of, for claims of jobs: `slurm CLUSTER 12`."""
    age_s: float = 0.0
    """Since its holder last gave a sign of life, by the clock of the file server."""

    def __str__(self) -> str:
        return f"{self.job and f'job {self.job}, '}process {self.pid} on {self.host} since {self.since}"

    @property
    def is_of_this_machine(self) -> bool:
        """Made under the kernel that asks, whatever the host is called: a file lock tells whether its holder lives."""
        return self.boot_id == _boot_id()


@contextlib.contextmanager
def exclusive(path: Path, *, timeout_s: float) -> Iterator[None]:
    """Holds a lock file, which is never deleted (that lets two processes hold "the" lock), for the length of the block.

    Raises:
        StoreError: Another process still holds the lock (the message names it), or the file system has no locks.
        OSError: This user may not write the file.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o664)

    def refusal() -> StoreError:
        try:
            holder = str(from_dict(Claim, parse_json(os.pread(fd, 4096, 0))))
        except (ValueError, TypeError):
            holder = "a process that has not registered yet"
        problem = f"another process is ingesting: {holder}; waited {timeout_s:g} s"
        hint = "wait for it; its snapshot will include every file in the spool"
        return StoreError(problem, where=str(path), hint=hint)

    def unlockable(what: str, hint: str) -> StoreError:
        return StoreError(what, where=str(path), hint=f"put the store {hint}")

    with locked(fd, refusal, unlockable, timeout_s):
        access.hand_on(path)
        os.ftruncate(fd, 0)
        os.pwrite(fd, _claim_text(), 0)
        try:
            yield
        finally:
            os.ftruncate(fd, 0)


@contextlib.contextmanager
def locked(
    fd: int, refusal: Callable[[], DflopError], unlockable: Callable[[str, str], DflopError], timeout_s: float
) -> Iterator[None]:
    """Hold the lock of an open file for the length of the block, and close it, as the kernel does if it is killed.

    Raises:
        DflopError: `refusal`, where somebody else holds it for longer; `unlockable`, given what happened and the end of
            a hint, where the file system has no locks.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        while not _try_lock(fd, unlockable):
            if time.monotonic() >= deadline_s:
                raise refusal()
            time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int, unlockable: Callable[[str, str], DflopError]) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        hint = "on a file system with flock (Lustre: mount with -o flock; NFS: v4)"
        raise unlockable(f"the file system cannot lock files ({error.strerror})", hint) from error
    return True


def read_claim(path: Path) -> Claim:
    """What a claim says; an OSError where there is none, a ValueError or TypeError where it is damaged."""
    content = path.read_bytes()  # first: opening makes an NFS client ask its server for the time of the last change
    return dataclasses.replace(from_dict(Claim, parse_json(content)), age_s=_age_s(path))


def newest_claim(folder: Path) -> Claim | None:
    """The claim that holds a lease, or held it last; None where nobody ever did, or it changes this moment."""
    claims = durable.numbered(folder, ".json")
    with contextlib.suppress(OSError, ValueError, TypeError):
        return read_claim(claims[max(claims)]) if claims else None
    return None


def is_alive(claim: Claim, lock: Path, lease_s: float) -> bool:
    """Whether the holder of a claim lives: on this machine by the file lock that it holds, else by its heartbeat."""
    if claim.is_released:
        return False
    if not claim.is_of_this_machine:
        return claim.age_s <= lease_s
    try:
        fd = os.open(lock, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def falls_silent(folder: Path, before: Claim, is_dead: Callable[[Claim], bool], sleep: Callable[[float], None]) -> bool:
    """Whether a holder on another node that may be dead is; no: it has given a heartbeat, or another one has it."""
    while True:
        sleep(LOOK_S)
        now = newest_claim(folder)
        if now is None or is_dead(now):
            return True
        if now.age_s < before.age_s:
            return False
        before = now


class Lease:
    """A held lease, on a store or on what claims in another folder (`name`) are for; used inside the file lock.

    A claim older than `lease_s` is dead; a holder on another node is waited for `timeout_s`.

    Raises:
        StoreError: Another node holds the lease for longer.
    """

    def __init__(
        self, store_root: Path, *, lease_s: float, timeout_s: float, name: str = FOLDER, job: str = ""
    ) -> None:
        self._folder, self._lease_s, self._job = store_root / name, lease_s, job
        durable.make_folder(self._folder)
        self.epoch = self._claim(timeout_s)
        """Number of this lease; every later holder has a higher one."""
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="dflop-lease", daemon=True)

    def __enter__(self) -> Lease:
        self._heart.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._heart.join()
        if self._newest() == self.epoch:
            durable.replace(self._path(self.epoch), _claim_text(self._job, is_released=True))

    def check(self) -> None:
        """Call it before every step that others would see.

        Raises:
            StoreError: Another ingester has taken over; nothing more may be written.
        """
        newest = self._newest()
        if newest != self.epoch:
            problem = f"epoch {newest} has taken over from epoch {self.epoch}, {self._holder()}"
            hint = "this process sent no heartbeat for too long; its uncommitted rows stay in the spool"
            raise StoreError(f"lost the ingest lease: {problem}", where=str(self._folder), hint=hint)

    def _claim(self, timeout_s: float) -> int:
        deadline_s = time.monotonic() + timeout_s
        while True:
            newest = self._newest()
            if not newest or self._is_free(newest):
                if self._takes(newest + 1):
                    return newest + 1
            elif time.monotonic() >= deadline_s:
                problem = f"another node is ingesting: epoch {newest}, {self._holder()}; waited {timeout_s:g} s"
                hint = f"wait for it; a claim expires {self._lease_s:g} s after the last heartbeat"
                raise StoreError(problem, where=str(self._folder), hint=hint)
            else:
                time.sleep(POLL_S)

    def _takes(self, epoch: int) -> bool:
        """Claims a number; whether nobody was faster. Lower claims are tidied away then."""
        try:
            durable.write_new(self._path(epoch), _claim_text(self._job))
        except FileExistsError:
            return False
        claims = durable.numbered(self._folder, ".json")
        is_ours = max(claims, default=0) == epoch
        # Not ours: while we looked, others took this number, a higher one, and tidied it away. It means nothing.
        for number, path in claims.items():
            if number < epoch if is_ours else number == epoch:
                path.unlink(missing_ok=True)
        return is_ours

    def _is_free(self, epoch: int) -> bool:
        try:
            age_s = _age_s(self._path(epoch))
            claim = read_claim(self._path(epoch))
        except FileNotFoundError:
            return False  # replaced by the next one while we looked; look again
        except (ValueError, TypeError):
            return age_s > self._lease_s  # half of one, for a moment; a damaged one expires as any other
        # We hold the file lock: a claim of this machine's own kernel belongs to a process that is gone.
        return claim.is_released or claim.is_of_this_machine or age_s > self._lease_s

    def _beat(self) -> None:
        while not self._stop.wait(self._lease_s / 6):
            try:
                os.utime(self._path(self.epoch))
            except FileNotFoundError:
                return  # taken over, or the store is gone: check() will say so
            except OSError:  # a server that is away for a moment
                continue

    def _newest(self) -> int:
        return max(durable.numbered(self._folder, ".json"), default=0)

    def _path(self, epoch: int) -> Path:
        return self._folder / f"{epoch:06d}.json"

    def _holder(self) -> str:
        return str(newest_claim(self._folder) or "with an unreadable claim")


def _age_s(path: Path) -> float:
    """Seconds since a file was touched, by the clock that dates the files of its folder."""
    probe = files.tmp_path(path)
    try:
        probe.touch()
        now_s = probe.stat().st_mtime
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        now_s = time.time()  # who may not write only looks
    finally:
        probe.unlink(missing_ok=True)
    return now_s - path.stat().st_mtime


def _claim_text(job: str = "", *, is_released: bool = False) -> bytes:
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return json.dumps(to_dict(Claim(os.getpid(), socket.gethostname(), since, _boot_id(), is_released, job))).encode()


def _boot_id() -> str:
    """Identity of the running kernel: what `flock` is decisive for, containers of one host included."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
