"""Where compiled kernels are kept: on a disk of this node, in a folder that nobody else can write to.

The default is beside the sources, which on a cluster is a network file system: slow to load from, and locked or
read-only where many nodes share one installation. Whoever can write to the folder can run code as its reader. The
folder's name has a hash of the sources: numba does not notice when a type that a kernel takes moves to another file.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "NUMBA_CACHE_DIR"
ROOMS = ("simulate", "schedule")
"""Rooms of `dflop` that hold kernels, and the types that kernels take."""


def kernel_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to add before a process that runs compiled kernels starts.

    None where the user has chosen, or the folder of that name is not ours alone: kernels then stay where they are.
    """
    if environ.get(VARIABLE):
        return {}
    folder = Path(tempfile.gettempdir()) / f"dflop-kernels-{os.getuid()}-{_version()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return {}
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return {VARIABLE: str(folder)} if is_ours else {}


def _version() -> str:
    """Hash of the sources of the rooms that hold kernels."""
    found = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((Path(__file__).parents[1] / room).glob("*.py")):
            found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]
