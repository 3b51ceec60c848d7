"""Who may do what in a store: stores of a group, and errors of permissions.

What is made in a folder of the group is the group's, whatever the umask of whoever makes it. A folder is a group's when
its members may write in it and it has the setgid bit, which hands the group on to what is made there. The modes of such
a folder decide about files in it; no setting has to be read. Elsewhere the umask decides. An error says which user,
which file or folder, its owner, group and mode, and what to do.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from dflop import files
from dflop.errors import ConfigError, StoreError, did_you_mean
from dflop.files import user_name

_DIR_BITS = stat.S_ISGID | 0o070
_HANDED_ON = 0o775
"""Bits that a file takes from its folder: what everybody may write stays a person's own decision."""
_DENIED = {os.strerror(code): code for code in (errno.EACCES, errno.EPERM, errno.EROFS)}
_OF_DUCKDB = re.compile(rf'file "(?P<path>[^"]+)".*?(?P<reason>{"|".join(_DENIED)})', re.DOTALL)


def is_shared(folder: Path) -> bool:
    """Whether a folder is one of a group; no where it cannot be looked at."""
    with contextlib.suppress(OSError):
        return folder.stat().st_mode & _DIR_BITS == _DIR_BITS
    return False


def hand_on(made: Path) -> None:
    """Gives the group of a shared folder its rights on a file or folder that was made in it, not by others."""
    if not is_shared(made.parent):
        return
    found, bits = made.stat(), made.parent.stat().st_mode & _HANDED_ON
    wanted = bits | stat.S_ISGID if stat.S_ISDIR(found.st_mode) else bits & 0o666
    if stat.S_IMODE(found.st_mode) != wanted and found.st_uid == os.geteuid():
        made.chmod(wanted)


@contextlib.contextmanager
def umask_of(folder: Path) -> Iterator[None]:
    """For the live database alone, as the umask is the process's: its log must be the group's from its first byte."""
    before = os.umask(0o777 & ~(folder.stat().st_mode & _HANDED_ON)) if is_shared(folder) else None
    try:
        yield
    finally:
        if before is not None:
            os.umask(before)


def group_id(name: str) -> int:
    """Number of a group, which may also be given by it, that this process may give files to.

    Raises:
        ConfigError: There is no such group, or this user is not in it.
    """
    mine = {group_name(gid): gid for gid in {os.getegid(), *os.getgroups()}}
    try:
        gid = int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except (KeyError, ValueError):
        raise ConfigError(f"no group `{name}`", where="--group", hint=did_you_mean(name, mine)) from None
    if os.geteuid() != 0 and gid not in mine.values():
        hint = f"name one of yours ({', '.join(sorted(mine))}), or log in again after being added to it"
        raise ConfigError(f"{user_name(os.geteuid())} is not in group `{name}`", where="--group", hint=hint)
    return gid


def share(tops: list[Path], gid: int) -> None:
    """Makes folders with all that is in them a group's: its members may read and write.

    Members may be hostile to whoever runs this (root, say), so no link is followed and no file opened: an opened and
    closed live database loses DuckDB's lock.

    Raises:
        StoreError: Something is another user's and was not the group's; everything else was changed.
    """
    others: list[tuple[Path, os.stat_result]] = []
    unreadable: list[OSError] = []
    for top in tops:
        _share_one(top, None, gid, others)
        for folder, folders, names, fd in os.fwalk(top, onerror=unreadable.append):
            for name in (*folders, *names):
                _share_one(Path(folder, name), fd, gid, others)
    if others:
        path, found = others[0]
        owners = ", ".join(sorted({user_name(stat_.st_uid) for _, stat_ in others}))
        message = (
            f"{len(others)} files or folders of other users do not belong to the group yet, the first {whose(found)}"
        )
        hint = f"everything else is done; {owners} or root must run the same command"
        raise StoreError(message, where=str(path), hint=hint)
    if unreadable:
        raise unreadable[0]


def obstacle(folder: Path) -> str:
    """Why members of a folder's group cannot come to it; empty where its parents let them, ACLs aside."""
    gid = folder.stat().st_gid
    for parent in reversed(folder.absolute().parents):
        found = parent.stat()
        if not found.st_mode & (stat.S_IXGRP if found.st_gid == gid else stat.S_IXOTH):
            return f"members of {group_name(gid)} cannot enter {parent}: {whose(found)}; chmod o+x opens the way"
    return ""


def whose(found: os.stat_result) -> str:
    """Owner, group and mode in words."""
    mode = stat.S_IMODE(found.st_mode)
    return f"owned by {user_name(found.st_uid)}, group {group_name(found.st_gid)}, mode {mode:04o}"


def group_name(gid: int) -> str:
    """Name of a group, or its number."""
    with contextlib.suppress(KeyError):
        return grp.getgrgid(gid).gr_name
    return f"gid {gid}"


def _share_one(path: Path, folder: int | None, gid: int, others: list[tuple[Path, os.stat_result]]) -> None:
    """Shares what is at `path`: an entry of an open folder, where one is given."""
    try:
        fd = os.open(path if folder is None else path.name, os.O_PATH | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:
        return
    try:
        found = os.fstat(fd)
        mode = stat.S_IMODE(found.st_mode)
        wanted = mode | (_DIR_BITS if stat.S_ISDIR(found.st_mode) else (mode & 0o600) >> 3)
        if stat.S_ISLNK(found.st_mode) or (found.st_gid, mode) == (gid, wanted):
            return
        if os.geteuid() not in (0, found.st_uid):
            others.append((path, found))
            return
        link = f"/proc/self/fd/{fd}"
        os.chown(link, -1, gid)
        os.chmod(link, wanted)  # after chown, which takes the setgid bit away
    finally:
        os.close(fd)


def error_of(what: str, error: Exception, root: Path, *, hint: str = "") -> StoreError:
    """An error of the file system or of DuckDB as one of ours; the hint is for those that are none of permissions."""
    denied = _denied(error)
    if denied is None:
        return StoreError(f"{what}: {error}", where=str(root), hint=hint)
    path, code = denied
    if path.name.startswith(files.TMP_PREFIX):
        path = path.parent
    if code == errno.EROFS:
        advice = "snapshots can be read; to write, mount it writable"
        return StoreError(f"{what}: the file system is mounted read-only", where=str(path), hint=advice)
    place, deed = _obstacle(path)
    try:
        found = place.stat()
        deed = f"{deed} {place}, {whose(found)}"
    except OSError:
        found, deed = None, f"look at {place}"
    message = f"{what}: {user_name(os.geteuid())} may not {deed}"
    return StoreError(message, where=str(path), hint=_advice(root, place, found))


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
        if not os.access(folder, os.X_OK, effective_ids=True):
            return folder, "enter"
    if not os.path.lexists(path):
        return next((f for f in path.parents if f.exists()), path.parent), "write in"
    if path.is_dir():
        return (path, "read") if not os.access(path, os.R_OK | os.X_OK, effective_ids=True) else (path, "write in")
    if not os.access(path, os.R_OK, effective_ids=True):
        return path, "read"
    if not os.access(path, os.W_OK, effective_ids=True) and os.access(path.parent, os.W_OK, effective_ids=True):
        return path, "write"
    parent = path.parent.stat()
    if parent.st_mode & stat.S_ISVTX and os.geteuid() not in (0, parent.st_uid):
        return path, "replace (its folder has the sticky bit)"
    return path.parent, "write in"


def _advice(root: Path, place: Path, found: os.stat_result | None) -> str:
    root, place = root.absolute(), place.absolute()
    command = f"dflop store init --store {root} --group"
    owner = f"{user_name(found.st_uid)} or root" if found else "its owner or root"
    if root.is_relative_to(place) and root != place:
        return f"{owner} must make the store reachable (chmod o+x {place}), or put the store elsewhere"
    if not is_shared(root):
        return f"for a team, {owner} must run `{command} GROUP` with a group of all its members"
    gid = root.stat().st_gid
    group = group_name(gid)
    if os.geteuid() != 0 and gid not in {os.getegid(), *os.getgroups()}:
        return f"the store is of group {group}: have {user_name(os.geteuid())} added to it, then log in again"
    if not place.is_relative_to(root):
        return f"{owner} must give access to group {group}: chgrp {group}, chmod g+rwxs (a file: g+rw)"
    return f"the store is of group {group}: {owner} must run `{command} {group}` again"
