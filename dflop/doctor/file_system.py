"""Whether a folder's file system does what store, runs and checkpoints rely on, tried in a folder that goes away.

Locks between processes (one ingester at a time), `link` that refuses to overwrite (spool files, claims), `rename` that
replaces in one step, with fsync of files and folders (CURRENT, plans), links (`current.duckdb`). How a mount
behaves between nodes is inferred from its type.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dflop import files, units
from dflop.doctor.finding import FAIL, OK, WARN, Finding
from dflop.store import access

AREA = "files"
MIN_FREE_BYTES = 5 << 30
SHARED_KINDS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "smb", "cifs", "9p")
_MOVE = "use another file system: --set store=..., DFLOP_STORE"
_NO_LOCKS = "mount it with locks (Lustre: -o flock; NFS: version 4), or move the store"


def file_system(what: str, folder: Path) -> Iterator[Finding]:
    """Findings about the file system of a folder (`what`: `store` or `runs`), or of where it would be made."""
    place = next((f for f in (folder.absolute(), *folder.absolute().parents) if os.path.isdir(f)), Path("/"))
    yield _kind(what, place)
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".tmp-doctor-") as made:
            for name, trial in (("locks", _try_lock), ("rename", _try_rename), ("link", _try_link)):
                try:
                    trial(Path(made))
                except (OSError, AssertionError) as error:
                    advice = _NO_LOCKS if name == "locks" else _MOVE
                    yield Finding(AREA, f"{what}: {name}", FAIL, f"{error} in {place}", advice)
                else:
                    yield Finding(AREA, f"{what}: {name}", OK, "works")
    except OSError as error:
        failure = access.error_of("cannot write", error, folder)
        yield Finding(AREA, f"{what}: writing", FAIL, failure.what, (what == "store" and failure.hint) or _MOVE)


def _try_lock(folder: Path) -> None:
    first, second = (os.open(folder / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        raise AssertionError("two processes got the same lock")
    finally:
        os.close(first)
        os.close(second)


def _try_rename(folder: Path) -> None:
    for text in ("old", "new"):
        files.replace(folder / "file", text, is_durable=True)
    if (folder / "file").read_text() != "new":
        raise AssertionError("a rename did not replace the file")


def _try_link(folder: Path) -> None:
    (folder / "a").write_text("a")
    os.link(folder / "a", folder / "b")
    os.symlink("b", folder / "symbolic")
    if (folder / "symbolic").read_text() != "a":
        raise AssertionError("a symbolic link leads nowhere")
    try:
        os.link(folder / "a", folder / "b")
    except FileExistsError:
        return
    raise AssertionError("a hard link replaced a file")


def _kind(what: str, folder: Path) -> Finding:
    kind, free_bytes = mount_kind(folder), shutil.disk_usage(folder).free
    detail = f"{kind} at {folder}, {units.num_bytes(free_bytes)} free"
    if free_bytes < MIN_FREE_BYTES:
        return Finding(AREA, what, WARN, detail, "a full disk stops ingesting and checkpoints: free space")
    if what == "store" and kind.startswith(SHARED_KINDS):
        advice = "a live database on a node's own disk is faster and safer: dflop store init --live FOLDER"
        return Finding(AREA, what, OK, f"{detail}, shared between nodes", advice)
    return Finding(AREA, what, OK, detail)


def mount_kind(folder: Path) -> str:
    """Kind of the file system a folder is on (`ext4`, `nfs4`, `lustre`, ...)."""
    with contextlib.suppress(OSError, IndexError):
        return subprocess.run(["df", "--output=fstype", folder], capture_output=True, text=True).stdout.split()[-1]
    return "unknown"
