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

import json
import os
import re
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from dflop import files
from dflop.errors import StoreError
from dflop.records import parse_json
from dflop.store import durable

POLL_S = 0.2
FOLDER = "INGEST.lease"
_CLAIM = re.compile(r"(\d{6,})\.json")


@dataclass(frozen=True, slots=True)
class Claim:
    """The newest claim in a folder, as anyone may look at it."""

    pid: int
    host: str
    since: str
    """UTC, `2026-11-20T12:00:00Z`."""
    is_released: bool
    is_of_this_machine: bool
    """Made under the kernel that asks, whatever the host is called: a file lock tells whether its holder lives."""
    age_s: float
    """Since its holder last gave a sign of life, by the clock of the file server."""


def newest_claim(folder: Path) -> Claim | None:
    """The claim that holds a lease, or held it last; None where nobody ever did, or it changes this moment."""
    if not folder.is_dir():
        return None
    epoch = _newest_epoch(folder)
    path = folder / f"{epoch:06d}.json"
    try:
        claim = _read_claim(path)
        age_s = _now_s(folder) - path.stat().st_mtime
        is_ours = claim["boot_id"] == _boot_id()
        return Claim(
            int(claim["pid"]), str(claim["host"]), str(claim["since"]), bool(claim["is_released"]), is_ours, age_s
        )
    except (OSError, ValueError, TypeError, KeyError):
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

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            if self._is_free(newest):
                try:
                    durable.write_new(self._path(newest + 1), _claim_text())
                except FileExistsError:
                    continue  # somebody else was faster
                if self._newest() == newest + 1:
                    self._forget_before(newest + 1)
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
        if not epoch:
            return True
        try:
            age_s = _now_s(self._folder) - self._path(epoch).stat().st_mtime
            claim = _read_claim(self._path(epoch))
        except FileNotFoundError:
            return False  # replaced by the next one while we looked; look again
        except ValueError:
            claim = {}  # half of one, for a moment; a damaged one expires as any other
        # We hold the file lock: a claim of this machine's own kernel belongs to a process that is gone.
        return bool(claim.get("is_released") or claim.get("boot_id") == _boot_id() or age_s > self._lease_s)

    def _beat(self) -> None:
        while not self._stop.wait(self._lease_s / 6):
            try:
                os.utime(self._path(self.epoch))
            except OSError:
                return  # taken over, or the store is gone: check() will say so

    def _newest(self) -> int:
        return _newest_epoch(self._folder)

    def _forget_before(self, epoch: int) -> None:
        for name in os.listdir(self._folder):
            match = _CLAIM.fullmatch(name)
            if match and int(match[1]) < epoch:
                (self._folder / name).unlink(missing_ok=True)

    def _path(self, epoch: int) -> Path:
        return self._folder / f"{epoch:06d}.json"

    def _holder(self, epoch: int) -> str:
        try:
            claim = _read_claim(self._path(epoch))
            return f"pid {claim['pid']} on {claim['host']} since {claim['since']}"
        except (OSError, ValueError, KeyError):
            return "whose claim cannot be read"


def _read_claim(path: Path) -> dict[str, Any]:
    """What a claim says.

    Raises:
        OSError: there is none.
        ValueError: it is damaged, or not written yet.
    """
    claim = parse_json(path.read_bytes())
    if not isinstance(claim, dict):
        raise ValueError("no object")
    return claim


def _newest_epoch(folder: Path) -> int:
    found = [int(m[1]) for name in os.listdir(folder) if (m := _CLAIM.fullmatch(name))]
    return max(found, default=0)


def _now_s(folder: Path) -> float:
    """What the clock says that dates the files in a folder."""
    probe = files.tmp_path(folder / "now")
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _claim_text(*, is_released: bool = False) -> bytes:
    claim = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "boot_id": _boot_id(),
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "is_released": is_released,
    }
    return json.dumps(claim).encode()


def _boot_id() -> str:
    """Identity of the running kernel: what `flock` is decisive for, containers of one host included."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
