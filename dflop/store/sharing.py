"""Stores of a group: what is made in a folder of the group is the group's, whatever the umask of whoever makes it.

A folder is a group's when its members may write in it and it has the setgid bit, which hands the group on to what is
made there. The modes of such a folder decide about files in it; no setting has to be read. Elsewhere the umask decides.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from dflop.errors import ConfigError, StoreError, did_you_mean

_DIR_BITS = stat.S_ISGID | 0o070
_HANDED_ON = 0o775
"""Bits that a file takes from its folder: what everybody may write stays a person's own decision."""


def is_shared(folder: Path) -> bool:
    """Whether a folder is one of a group; no where it cannot be looked at."""
    try:
        mode = folder.stat().st_mode
    except OSError:
        return False
    return mode & _DIR_BITS == _DIR_BITS


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
    """For what a library makes in a shared folder: DuckDB's log must be the group's from its first byte.

    The umask is the whole process's, so this is for the live database only.
    """
    if not is_shared(folder):
        yield
        return
    before = os.umask(0o777 & ~(folder.stat().st_mode & _HANDED_ON))
    try:
        yield
    finally:
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
        raise ConfigError(f"there is no group `{name}`", where="--group", hint=did_you_mean(name, mine)) from None
    if os.geteuid() != 0 and gid not in mine.values():
        raise ConfigError(
            f"{user_name(os.geteuid())} is not in group `{name}`",
            where="--group",
            hint=f"name one of yours ({', '.join(sorted(mine))}), or log in again after you were added to it",
        )
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
        for folder, folders, files, fd in os.fwalk(top, onerror=unreadable.append):
            for name in (*folders, *files):
                _share_one(Path(folder, name), fd, gid, others)
    if not others:
        if unreadable:
            raise unreadable[0]
        return
    path, found = others[0]
    owners = sorted({user_name(stat_.st_uid) for _, stat_ in others})
    raise StoreError(
        f"{len(others)} files or folders are others' and not yet the group's, the first {whose(found)}",
        where=str(path),
        hint=f"everything else is done; let {', '.join(owners)} run the same command, or root",
    )


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


def user_name(uid: int) -> str:
    """Name of a user, or its number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def group_name(gid: int) -> str:
    """Name of a group, or its number."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
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
