"""One ingester at a time, decided before DuckDB sees the file.

DuckDB's own lock is taken after the header is read (2.0.0), so a process that opens the live file while another one
commits can overwrite acknowledged rows without an error. A sidecar `flock`, taken before `connect` and held past
`close`, closes that window. The lock file's content names the holder for people; the lock itself dies with the
holder's process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflop.errors import StoreError
from dflop.records import from_dict, parse_json, to_dict
from dflop.store import sharing

POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock or a lease, as it has written itself down."""

    pid: int
    host: str
    since: str
    """UTC, `2026-11-20T12:00:00Z`."""

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host} since {self.since}"


def this_process() -> Holder:
    """The holder that we would be."""
    return Holder(os.getpid(), socket.gethostname(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))


@contextlib.contextmanager
def exclusive(path: Path, *, timeout_s: float) -> Iterator[None]:
    """Holds the lock file `path` for the duration of the block.

    Args:
        path: Lock file; created when missing, never deleted (deleting one lets two processes hold "the" lock).
        timeout_s: How long to wait for another holder.

    Raises:
        StoreError: Another process still holds the lock (the message names it), or the file system has no locks.
        OSError: This user may not write the file.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o664)
    try:
        sharing.hand_on(path)
        _acquire(fd, path, timeout_s)
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(to_dict(this_process())).encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)  # releases the lock


def _acquire(fd: int, path: Path, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise StoreError(
                    f"another process is ingesting: {_holder(fd)}; waited {timeout_s:g} s",
                    where=str(path),
                    hint="let it finish; its snapshot will hold every file that is in the spool by then",
                ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            raise StoreError(
                f"the file system cannot lock files ({error.strerror})",
                where=str(path),
                hint="put the store on a file system with flock (Lustre: mount with -o flock; NFS: v4)",
            ) from error
        time.sleep(POLL_S)


def _holder(fd: int) -> str:
    try:
        return str(from_dict(Holder, parse_json(os.pread(fd, 4096, 0))))
    except (ValueError, TypeError):
        return "a process that has not written its name yet"
