"""Atomic replacement of files: readers see the old content or the new, with concurrent writers and after kills.

Jobs and drivers on several nodes write and read the same small files. Each writer uses a unique temporary name in
the same folder, and `rename` is atomic on every file system that dflop supports.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

TMP_PREFIX = ".tmp-"


def tmp_path(final: Path) -> Path:
    """A name in the folder of `final` that no other process, host or thread can pick."""
    return final.with_name(f"{TMP_PREFIX}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}")


@contextlib.contextmanager
def replacing(final: Path, *, is_durable: bool = False) -> Iterator[Path]:
    """For the length of the block a path to write to; behind it that file stands in the place of `final`.

    Args:
        final: What is replaced; need not exist.
        is_durable: The bytes and the name are on disk behind the block: two fsyncs.

    Raises:
        OSError: The folder is missing, or the disk is full or failing; the old file stays, nothing is left behind.
    """
    tmp = tmp_path(final)
    try:
        yield tmp
        if is_durable:
            fsync(tmp)
        os.replace(tmp, final)
    except BaseException:
        with contextlib.suppress(OSError):
            tmp.unlink()
        raise
    if is_durable:
        fsync(final.parent)


def written(output: Path) -> AbstractContextManager[Path]:
    """As `replacing`, for what a person names: a pipe or a device is written into, not replaced by a file."""
    return contextlib.nullcontext(output) if output.exists() and not output.is_file() else replacing(output)


def replace(final: Path, content: str | bytes, *, is_durable: bool = False) -> None:
    """Replace a file by this content.

    Args:
        final: What is replaced; need not exist.
        content: Text becomes UTF-8.
        is_durable: See `replacing`.

    Raises:
        OSError: As `replacing`.
    """
    with replacing(final, is_durable=is_durable) as tmp:
        tmp.write_bytes(content.encode() if isinstance(content, str) else content)


def fsync(path: Path) -> None:
    """Force the bytes of a file, or the names in a folder, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def user_name(uid: int) -> str:
    """Name of an owner, or `uid 123` of one that this machine does not know."""
    with contextlib.suppress(KeyError, OverflowError):
        return pwd.getpwuid(uid).pw_name
    return f"uid {uid}"
