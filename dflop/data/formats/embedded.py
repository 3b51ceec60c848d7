"""Media files that lie inside another file, as open files."""

from __future__ import annotations

import abc
import io
import os
from pathlib import Path
from typing import BinaryIO

from dflop.data.annotations import BadSample, MediaRef, confine
from dflop.data.conversation import ReadRow
from dflop.data.frame_files import AnySource, FrameFiles, open_frames
from dflop.data.frame_folders import FrameList
from dflop.data.media_value import Attached
from dflop.errors import DataError


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


def open_attached(row: ReadRow, path: str, media_root: Path) -> NamedBytes | FrameFiles:
    """Bytes, or a list of frames, that stand in a row, by the name that its sample has for them.

    Raises:
        BadSample: there are none of this name, they are no bytes, or frames are not where the list says.
    """
    attached = row.attached.get(path)
    if attached is None:
        raise BadSample("no such media item in its row", path=path)

    def opened(content: Attached) -> NamedBytes:
        return NamedBytes(content.decoded(), content.name or path)

    return open_frames(attached, media_root, opened) if isinstance(attached, FrameList) else opened(attached)


class MediaOfRows(abc.ABC):
    """A file of rows, media of which stand in the rows or are named by them."""

    @abc.abstractmethod
    def _read(self, index: int) -> ReadRow:
        """Row `index` with what stands in it."""

    @abc.abstractmethod
    def _holds(self, path: str) -> bool:
        """Whether a media item is in this file, or a list of its frames."""

    def embeds(self, ref: MediaRef) -> bool:
        """Whether its bytes are in this file; frames that a list in a row names may be elsewhere."""
        return self._holds(ref.path) and not ref.frames

    def open_media(self, index: int, ref: MediaRef, media_root: Path) -> AnySource:
        """Bytes or frames that stand in row `index`, or the path of a file under the media root, not checked further.

        Raises:
            BadSample: no such item, or a path that leaves the media root.
        """
        if self._holds(ref.path):
            return open_attached(self._read(index), ref.path, media_root)
        return confine(media_root, ref.path)


def stat_fingerprint(path: Path) -> str:
    """Name, size and time of change of a container of media: hashing terabytes to notice an edit takes hours.

    Raises:
        DataError: there is no such file.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"file cannot be read: {error.strerror}", where=str(path)) from error
    return f"{path.name}\t{status.st_size}\t{status.st_mtime_ns}"


def open_window(path: Path, start: int, size_bytes: int, name: str) -> BinaryIO:
    """Bytes [start, start + size_bytes) of a file as an open file of this name, read as they are asked for.

    Raises:
        OSError: the file cannot be opened.
    """
    return io.BufferedReader(_Window(path, start, size_bytes, name))
