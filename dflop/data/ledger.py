"""Media files that a row names anywhere, under whatever key or within a text, and that are not placed as its media.

No list of keys decides: a string with the suffix of a media file is a name, and a name counts where the file exists.
Suffixes are looked for first and folders are listed once, so that rows which name nothing else cost microseconds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path

from dflop.data.media_value import EXTENSIONS

_SUFFIXES = tuple(chain(*EXTENSIONS.values()))
_FIRST = "".join({suffix[0] for suffix in _SUFFIXES})
# To look at one letter first makes it eight times as fast in prose.
_SUFFIX = re.compile(rf"\.(?=[{_FIRST}{_FIRST.upper()}])(?i:{'|'.join(_SUFFIXES)})(?![A-Za-z0-9_])")
_CUT = re.compile(r"[\s\"'`<>|()\[\]{},;=*:]")
"""What ends a name within a text."""
_ADDRESS = re.compile(r"(?!file:)\w+://")
_LONGEST = 500


def names_in(row: dict[str, object], ignored_keys: Collection[str]) -> Iterator[tuple[str, str]]:
    """(keys that lead to it, joined by dots; name) of all that looks like a media file in a row."""
    waiting: list[tuple[str, object]] = [("", row)]
    while waiting:
        keys, value = waiting.pop()
        if isinstance(value, str):
            yield from ((keys, name) for name in _names(value))
        elif isinstance(value, dict | list | tuple):
            pairs = value.items() if isinstance(value, dict) else (("", inner) for inner in value)
            for key, inner in pairs:
                is_worth_it = "." in inner if isinstance(inner, str) else isinstance(inner, dict | list | tuple)
                if is_worth_it and key not in ignored_keys:
                    waiting.append((f"{keys}.{key}" if keys and key else f"{keys}{key}", inner))


def _names(text: str) -> Iterator[str]:
    for match in _SUFFIX.finditer(text):
        start = max(0, match.start() - _LONGEST)
        name = _CUT.split(text[start : match.end()])[-1]
        if match.end() == len(text) and not start and name != text and not _ADDRESS.match(text):
            yield text  # names of files may hold spaces
        yield name


class MediaFolder:
    """Which files there are under a media root.

    Args:
        root: It.
    """

    def __init__(self, root: Path) -> None:
        self._root = os.path.abspath(root)
        self._names: dict[str, frozenset[str]] = {}

    def path(self, name: str) -> str:
        """Where a file of this name would be."""
        return os.path.normpath(os.path.join(self._root, name))

    def find(self, name: str, *, by_end: bool = False) -> str | None:
        """Path of a file that exists; `by_end`: also one that the end of the name leads to, as of another machine."""
        parts = name.split("/")
        for first in range(len(parts) if by_end and not name.startswith("//") else 1):
            is_near = parts[first] in self._list(self._root) or (not first and parts[0] in ("", ".", ".."))
            if is_near and self._has(path := self.path("/".join(parts[first:]))):
                return path
        return None

    def _has(self, path: str) -> bool:
        folder, name = os.path.split(path)
        return folder.startswith(self._root) and name in self._list(folder)

    def _list(self, folder: str) -> frozenset[str]:
        if folder not in self._names:
            is_there = folder == self._root or self._has(folder)
            try:
                self._names[folder] = frozenset(os.listdir(folder) if is_there else ())
            except (OSError, ValueError):
                self._names[folder] = frozenset()
        return self._names[folder]
