"""Checkpoint folders on disk: which are complete, which is the newest, and what may be deleted.

`step-00000020/` holds the files of every rank and `manifest.json`: what the run says of the checkpoint, and size and
checksum of every file. It is renamed into place when all of it is on disk; a folder is believed only if its files are
what the manifest says. Nothing here knows torch or other ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflop.files import TMP_PREFIX, fsync
from dflop.records import parse_json

MANIFEST = "manifest.json"
INDEX = "index.json"
"""Of the tensors; see `blocks.py`."""
_CHUNK_BYTES = 4 << 20

FileState = tuple[int, int]
"""(bytes, CRC-32)."""


def name_of(next_step: int) -> str:
    """Name of the checkpoint of the state before `next_step`; names sort like steps."""
    return f"step-{next_step:08d}"


def read_latest(folder: Path) -> dict[str, Any] | None:
    """What the run says of the newest checkpoint in `folder` that has all its files, or None."""
    return newest_sound(folder, problem_of=lambda path: checkpoint_problem(path, problem_of=size_problem))[0]


def candidates(folder: Path) -> list[str]:
    """Checkpoints that may be loaded, newest first."""
    return sorted((path.name for path in folder.glob("step-*")), reverse=True)


def read_manifest(checkpoint: Path) -> tuple[dict[str, Any], dict[str, FileState]]:
    """(what the run says of a checkpoint, state of its files by name).

    Raises:
        ValueError: missing or damaged, or it speaks of anything but files of this folder.
    """
    try:
        content = parse_json((checkpoint / MANIFEST).read_bytes())
        # The folder's name, whatever the file says: it is what is loaded next.
        meta = {"next_step": 0, **content["meta"], "name": checkpoint.name}
        files = {name: (int(size), int(crc)) for name, (size, crc) in content["files"].items()}
    except OSError as error:
        raise ValueError(f"{MANIFEST}: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise ValueError(f"{MANIFEST} is damaged") from None
    if any(name in ("", ".", "..") or Path(name).name != name for name in files):
        raise ValueError(f"{MANIFEST} names files outside the checkpoint")
    return meta, files


def file_state(path: Path) -> FileState:
    """Size and checksum of a file.

    Raises:
        OSError: it cannot be read.
    """
    crc = num_bytes = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
            num_bytes += len(chunk)
    return num_bytes, crc


def size_problem(path: Path, expected: FileState) -> str:
    """Why a file cannot be the one that was written, as far as its size tells; empty where it can."""
    try:
        found = path.stat()
    except OSError as error:
        return f"{path.name}: {error.strerror or error}"
    if not stat.S_ISREG(found.st_mode):
        return f"{path.name} is not a regular file"  # reading a pipe would wait for ever
    return "" if found.st_size == expected[0] else f"{path.name} has {found.st_size} bytes instead of {expected[0]}"


def content_problem(path: Path, expected: FileState) -> str:
    """As `size_problem`, after reading all of it."""
    try:
        return size_problem(path, expected) or ("" if file_state(path) == expected else f"{path.name} has changed")
    except OSError as error:
        return f"{path.name}: {error.strerror or error}"


def checkpoint_problem(
    checkpoint: Path, share: slice = slice(None), problem_of: Callable[[Path, FileState], str] = content_problem
) -> str:
    """Why a checkpoint is not what was written; empty where it is, as far as a share of its files tells.

    One that leaves the index of tensors out of its manifest vouches for none.
    """
    try:
        _, files = read_manifest(checkpoint)
    except ValueError as error:
        return str(error)
    if INDEX not in files:
        return f"{MANIFEST} does not list {INDEX}"
    problems = (problem_of(checkpoint / name, files[name]) for name in sorted(files)[share])
    return next(filter(None, problems), "")


def newest_sound(
    folder: Path, names: Sequence[str] | None = None, problem_of: Callable[[Path], str] = checkpoint_problem
) -> tuple[dict[str, Any] | None, list[str]]:
    """What the run says of the newest checkpoint whose files are what was written, and what is wrong with newer ones.

    Args:
        folder: Of checkpoints.
        names: Those that may be loaded, newest first; None: `candidates`.
        problem_of: Reads all of one; ranks share that out among themselves (`checkpoint.py`).
    """
    damaged: list[str] = []
    for name in candidates(folder) if names is None else names:
        problem = problem_of(folder / name)
        if not problem:
            return read_manifest(folder / name)[0], damaged
        damaged.append(f"{name}: {problem}")
    return None, damaged


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file that is on disk when this returns.

    Raises:
        OSError: it cannot be written.
    """
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())


def publish(temporary: Path, meta: Mapping[str, Any], files: Mapping[str, FileState], keep: int) -> None:
    """Make a written folder the newest checkpoint, and delete what is more than `keep`.

    Args:
        temporary: Beside the checkpoints, complete but for the manifest.
        meta: What the run says of it; `name` is the one it gets.
        files: Its files.
        keep: Checkpoints that stay, this one among them.

    Raises:
        OSError: the disk is full or failing; the checkpoints before it are as they were.
    """
    folder, name = temporary.parent, str(meta["name"])
    write_json(temporary / MANIFEST, {"meta": dict(meta), "files": dict(files)})
    fsync(temporary)
    if (folder / name).exists():
        os.replace(folder / name, folder / f"{TMP_PREFIX}old-{name}")
    os.replace(temporary, folder / name)
    fsync(folder)
    keep_older(folder, name, keep)
    sweep(folder)


def keep_older(folder: Path, name: str, keep: int) -> None:
    """Make a checkpoint the newest, for those after it have fallen to damage, and delete what is more than `keep`."""
    names = candidates(folder)
    at = names.index(name)
    for other in (*names[:at], *names[at + keep :]):
        shutil.rmtree(folder / other, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what writers left that were killed; no write may be going on."""
    for path in folder.glob(f"{TMP_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)
