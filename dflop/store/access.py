"""Permission errors in a store: which user, which file or folder, its owner, group and mode, and what to do."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from dflop import files
from dflop.errors import StoreError
from dflop.store import sharing

_DENIED = {os.strerror(code): code for code in (errno.EACCES, errno.EPERM, errno.EROFS)}
_OF_DUCKDB = re.compile(rf'file "(?P<path>[^"]+)".*?(?P<reason>{"|".join(_DENIED)})', re.DOTALL)


def error_of(what: str, error: Exception, root: Path, *, hint: str = "") -> StoreError:
    """An error of the file system or of DuckDB as one of ours.

    Args:
        what: What could not be done.
        error: Of permissions or of another kind.
        root: Folder of the store.
        hint: What to do where it is none of permissions.
    """
    denied = _denied(error)
    if denied is None:
        return StoreError(f"{what}: {error}", where=str(root), hint=hint)
    path, code = denied
    if path.name.startswith(files.TMP_PREFIX):
        path = path.parent
    if code == errno.EROFS:
        advice = "what is published can be read; to write, mount it for writing or work where it is"
        return StoreError(f"{what}: the file system is mounted read-only", where=str(path), hint=advice)
    place, deed = _obstacle(path)
    try:
        found = place.stat()
        deed = f"{deed} {place}, {sharing.whose(found)}"
    except OSError:
        found, deed = None, f"look at {place}"
    told = f"{what}: {sharing.user_name(os.geteuid())} may not {deed}"
    return StoreError(told, where=str(path), hint=_advice(root, place, found))


def is_denied(error: Exception) -> bool:
    """Whether it is for permissions that something failed, or a read-only mount."""
    return _denied(error) is not None


def _denied(error: Exception) -> tuple[Path, int] | None:
    if isinstance(error, OSError):
        if error.errno is None or error.errno not in _DENIED.values() or not isinstance(error.filename, str | Path):
            return None
        return Path(error.filename), error.errno
    found = _OF_DUCKDB.search(str(error))
    return (Path(found["path"]), _DENIED[found["reason"]]) if found else None


def _obstacle(path: Path) -> tuple[Path, str]:
    """The file or folder whose mode is in the way, and what it does not allow."""
    path = path.absolute()
    for folder in reversed(path.parents):
        if not _may(folder, os.X_OK):
            return folder, "enter"
    if not os.path.lexists(path):
        return next((f for f in path.parents if f.exists()), path.parent), "write in"
    if path.is_dir():
        return (path, "read") if not _may(path, os.R_OK | os.X_OK) else (path, "write in")
    if not _may(path, os.R_OK):
        return path, "read"
    if not _may(path, os.W_OK) and _may(path.parent, os.W_OK):
        return path, "write"
    parent = path.parent.stat()
    if parent.st_mode & stat.S_ISVTX and os.geteuid() not in (0, parent.st_uid):
        return path, "replace (its folder has the sticky bit)"
    return path.parent, "write in"


def _may(path: Path, mode: int) -> bool:
    try:
        return os.access(path, mode, effective_ids=True)
    except OSError:
        return False


def _advice(root: Path, place: Path, found: os.stat_result | None) -> str:
    root, place = root.absolute(), place.absolute()
    command = f"dflop store init --store {root} --group"
    owner = f"{sharing.user_name(found.st_uid)} or root" if found else "its owner or root"
    if root.is_relative_to(place) and root != place:
        return f"let {owner} open the way to the store (chmod o+x {place}), or put the store elsewhere"
    if not sharing.is_shared(root):
        return f"for a team, let {owner} run `{command} GROUP` with a group of all its members"
    gid = root.stat().st_gid
    group = sharing.group_name(gid)
    if os.geteuid() != 0 and gid not in {os.getegid(), *os.getgroups()}:
        return f"the store is of group {group}: have {sharing.user_name(os.geteuid())} added to it, then log in again"
    if not place.is_relative_to(root):
        return f"let {owner} open it to group {group}: chgrp {group}, chmod g+rwxs (a file: g+rw)"
    return f"the store is of group {group}: let {owner} run `{command} {group}` again"
