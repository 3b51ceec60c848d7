"""Media files that lie inside another file, as open files."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import BinaryIO


class NamedBytes(io.BytesIO):
    """A file in memory; FFmpeg looks at the suffix of `name` where the content leaves the format open."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.name = name


class _Window(io.RawIOBase):
    """Bytes [start, start + size) of a file, as a file."""

    def __init__(self, path: Path, start: int, size_bytes: int, name: str) -> None:
        self._file = path.open("rb", buffering=0)
        self._start, self._size_bytes, self._at = start, size_bytes, 0
        self.name = name

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size_bytes}[whence]
        if at < 0:
            raise OSError(f"position {at} lies before the file")
        self._at = at
        return at

    # typeshed asks for any writable buffer; io.BufferedReader gives these two.
    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]  # less than typeshed asks for
        view = memoryview(buffer)[: max(0, self._size_bytes - self._at)]
        if not len(view):
            return 0
        count = os.preadv(self._file.fileno(), [view], self._start + self._at)
        self._at += count
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def open_window(path: Path, start: int, size_bytes: int, name: str) -> BinaryIO:
    """Bytes [start, start + size_bytes) of a file as an open file of this name, read as they are asked for.

    Raises:
        OSError: the file cannot be opened.
    """
    return io.BufferedReader(_Window(path, start, size_bytes, name))
