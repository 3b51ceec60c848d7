"""Who may ingest, agreed between nodes whose file locks cannot be trusted.

    <store>/INGEST.lease/<epoch>.json    one claim per ingest, numbered; the highest number holds the lease

`flock` is decisive on one node. Across nodes it is only as good as the mount (NFS without a lock manager, Lustre with
`localflock`), so an ingester also claims the next epoch: `link()` lets exactly one process create a number, on NFS
too. A holder touches its claim while it works; a claim not touched for `lease_s` is taken over by the next epoch. Its
owner, if it was only asleep, finds the higher number when it checks before its next commit or publish, and stops
(fencing). Ages are differences of file times, so they are read off one clock, the file server's. What stays: a holder
that falls asleep between its check and its commit for longer than `lease_s`, on a mount without locks.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from dflop import files
from dflop.errors import StoreError
from dflop.records import from_dict, parse_json, to_dict
from dflop.store import durable, lock

POLL_S = 0.2
FOLDER = "INGEST.lease"


@dataclass(frozen=True, slots=True)
class Claim(lock.Holder):
    """A numbered claim, as anyone may look at it."""

    boot_id: str = ""
    """Of the kernel under which it was made."""
    is_released: bool = False
    age_s: float = 0.0
    """Since its holder last gave a sign of life, by the clock of the file server."""

    @property
    def is_of_this_machine(self) -> bool:
        """Made under the kernel that asks, whatever the host is called: a file lock tells whether its holder lives."""
        return self.boot_id == _boot_id()


def read_claim(path: Path) -> Claim:
    """What a claim says.

    Raises:
        OSError: There is none.
        ValueError, TypeError: It is damaged, or not written yet.
    """
    age_s = _age_s(path)
    return dataclasses.replace(from_dict(Claim, parse_json(path.read_bytes())), age_s=age_s)


def newest_claim(folder: Path) -> Claim | None:
    """The claim that holds a lease, or held it last; None where nobody ever did, or it changes this moment."""
    claims = durable.numbered(folder, ".json")
    try:
        return read_claim(claims[max(claims)]) if claims else None
    except (OSError, ValueError, TypeError):
        return None


class Lease:
    """A held lease; use it as a context manager, inside the file lock.

    Args:
        store_root: Folder of the store.
        lease_s: A claim older than this is dead.
        timeout_s: How long to wait for a holder on another node.
        name: Folder of the claims, for leases on something else than a store.

    Raises:
        StoreError: Another node holds the lease for longer than `timeout_s`.
    """

    def __init__(self, store_root: Path, *, lease_s: float, timeout_s: float, name: str = FOLDER) -> None:
        self._folder = store_root / name
        self._lease_s = lease_s
        durable.make_folder(self._folder)
        self.epoch = self._claim(time.monotonic() + timeout_s, timeout_s)
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
            durable.replace(self._path(self.epoch), _claim_text(is_released=True))

    def check(self) -> None:
        """Call it before every step that others would see.

        Raises:
            StoreError: Another ingester has taken over; nothing more may be written.
        """
        newest = self._newest()
        if newest != self.epoch:
            raise StoreError(
                f"lost the ingest lease: epoch {newest} has taken over from epoch {self.epoch}, {self._holder(newest)}",
                where=str(self._folder),
                hint="this process was silent for too long; what it had not committed stays in the spool",
            )

    def _claim(self, deadline_s: float, timeout_s: float) -> int:
        while True:
            newest = self._newest()
            if not newest or self._is_free(newest):
                try:
                    durable.write_new(self._path(newest + 1), _claim_text())
                except FileExistsError:
                    continue  # somebody else was faster
                claims = durable.numbered(self._folder, ".json")
                if max(claims, default=0) == newest + 1:
                    for path in [path for epoch, path in claims.items() if epoch <= newest]:
                        path.unlink(missing_ok=True)
                    return newest + 1
                # While we looked, others took this number, a higher one, and tidied ours away: it means nothing.
                self._path(newest + 1).unlink(missing_ok=True)
                continue
            if time.monotonic() >= deadline_s:
                raise StoreError(
                    f"another node is ingesting: epoch {newest}, {self._holder(newest)}; waited {timeout_s:g} s",
                    where=str(self._folder),
                    hint=f"let it finish; a claim expires {self._lease_s:g} s after its node's last sign of life",
                )
            time.sleep(POLL_S)

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
            except OSError:
                return  # taken over, or the store is gone: check() will say so

    def _newest(self) -> int:
        return max(durable.numbered(self._folder, ".json"), default=0)

    def _path(self, epoch: int) -> Path:
        return self._folder / f"{epoch:06d}.json"

    def _holder(self, epoch: int) -> str:
        try:
            return str(read_claim(self._path(epoch)))
        except (OSError, ValueError, TypeError):
            return "whose claim cannot be read"


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


def _claim_text(*, is_released: bool = False) -> bytes:
    content = to_dict(lock.this_process()) | {"boot_id": _boot_id(), "is_released": is_released}
    return json.dumps(content).encode()


def _boot_id() -> str:
    """Identity of the running kernel: what `flock` is decisive for, containers of one host included."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
