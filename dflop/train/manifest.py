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

from dflop import files
from dflop.files import TMP_PREFIX, fsync
from dflop.records import parse_json

MANIFEST = "manifest.json"
INDEX = "index.json"
"""Index of the tensors; see `blocks.py`."""
BEST = "best"
"""Key in what the run says of a checkpoint: the name of an older one that stays, however many come after it."""
VALIDATED = "validation"
"""Key in what the run says of a checkpoint: lowest validation loss, its step, and validations since then."""
_CHUNK_BYTES = 4 << 20

FileState = tuple[int, int]
"""(bytes, CRC-32)."""


def name_of(next_step: int) -> str:
    """Name of the checkpoint of the state before `next_step`; names sort like steps."""
    return f"step-{next_step:08d}"


def read_latest(folder: Path) -> dict[str, Any] | None:
    """What the run says of the newest checkpoint in `folder` that has all its files, or None."""
    return newest_sound(folder, problem_of=lambda path: checkpoint_problem(path, reads=False))[0]


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
        states = {name: (int(size), int(crc)) for name, (size, crc) in content["files"].items()}
    except OSError as error:
        raise ValueError(f"{MANIFEST}: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise ValueError(f"{MANIFEST} is damaged") from None
    if any(name in ("", ".", "..") or Path(name).name != name for name in states):
        raise ValueError(f"{MANIFEST} names files outside the checkpoint")
    return meta, states


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


def checkpoint_problem(checkpoint: Path, share: slice = slice(None), *, reads: bool = True) -> str:
    """Why a checkpoint is not what was written; empty where it is, as far as a share of its files tells.

    One that leaves the index of tensors out of its manifest vouches for none. Without `reads` only sizes are looked at.
    """
    try:
        _, states = read_manifest(checkpoint)
    except ValueError as error:
        return str(error)
    if INDEX not in states:
        return f"{MANIFEST} does not list {INDEX}"
    problems = (_file_problem(checkpoint / name, states[name], reads) for name in sorted(states)[share])
    return next(filter(None, problems), "")


def _file_problem(path: Path, expected: FileState, reads: bool) -> str:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            return f"{path.name} is not a regular file"  # reading a pipe would wait for ever
        if found.st_size != expected[0]:
            return f"{path.name} has {found.st_size} bytes instead of {expected[0]}"
        return f"{path.name} has changed" if reads and file_state(path) != expected else ""
    except OSError as error:
        return f"{path.name}: {error.strerror or error}"


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


def publish(temporary: Path, meta: Mapping[str, Any], states: Mapping[str, FileState], keep: int) -> None:
    """Make a written folder the newest checkpoint, and delete what is more than `keep`.

    Args:
        temporary: Beside the checkpoints, complete but for the manifest.
        meta: What the run says of it; `name` is the one it gets.
        states: Of its files.
        keep: Checkpoints that stay, this one among them.

    Raises:
        OSError: the disk is full or failing; the checkpoints before it are as they were.
    """
    folder, name = temporary.parent, str(meta["name"])
    content = json.dumps({"meta": dict(meta), "files": dict(states)})
    files.replace(temporary / MANIFEST, content, is_durable=True)
    shutil.rmtree(folder / name, ignore_errors=True)  # damaged: training has gone back before it
    os.replace(temporary, folder / name)
    fsync(folder)
    keep_older(folder, meta, keep)


def keep_older(folder: Path, meta: Mapping[str, Any], keep: int) -> None:
    """Make a checkpoint the newest, for those after it have fallen to damage, and delete what is more than `keep`."""
    names = candidates(folder)
    at = names.index(str(meta["name"]))
    for other in (*names[:at], *(n for n in names[at + keep :] if n != meta.get(BEST))):
        shutil.rmtree(folder / other, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what writers left that were killed; no write may be going on."""
    for path in folder.glob(f"{TMP_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)
