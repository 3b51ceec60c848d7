"""What every format of training data offers: rows by number, and the media that lie inside it or next to it."""

from __future__ import annotations

import abc
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dflop.data.annotations import AnnotatedSample, BadSample, MediaRef, confine, printable
from dflop.data.conversation import ReadRow, read_row
from dflop.data.formats.embedded import NamedBytes
from dflop.data.formats.row_mapping import RowMapping
from dflop.data.frame_files import AnySource, FrameList, open_frames
from dflop.data.media_value import Attached
from dflop.errors import DataError


class RowSource(abc.ABC):
    """Random access to the rows of one file. Not to be shared by processes: open it in each.

    Args:
        path: The file; its name begins the names of media that stand in its rows.
        ignored_keys: Keys that may be ignored besides those of `row_keys.py`.
        mapping: What is done to a row before it is read.
    """

    def __init__(self, path: Path, ignored_keys: Collection[str] = (), mapping: RowMapping | None = None) -> None:
        self.path = path
        self._mapping = mapping
        self._container = printable(path.name)
        self._ignored_keys = ignored_keys

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of rows, good and bad."""

    @abc.abstractmethod
    def row(self, index: int) -> dict[str, Any]:
        """Row `index` as it is written.

        Raises:
            BadSample: the row is not an object or cannot be read.
            IndexError: there is no such row.
        """

    def spread(self, number: int) -> range:
        """So many rows from all over, or all if there are fewer."""
        return range(0, len(self), max(1, len(self) // number))[:number]

    def sample(self, index: int) -> AnnotatedSample:
        """Row `index`, interpreted.

        Raises:
            BadSample: the row is malformed; the reason says how.
        """
        return self._read(index).sample

    def members(self) -> Collection[str]:
        """Names of the media files in this file that are no part of a row; none unless it is an archive."""
        return ()

    def embeds(self, ref: MediaRef) -> bool:
        """Whether its bytes are in this file, so that `fingerprint` covers them; frames of a list may be elsewhere."""
        return self._holds(ref.path) and not ref.frames

    def open_media(self, index: int, ref: MediaRef, media_root: Path) -> AnySource:
        """Bytes or frames that stand in row `index`, or the path of a file under the media root, not checked further.

        Raises:
            BadSample: no such item, bytes that are none, or a path that leaves the media root.
        """
        if not self._holds(ref.path):
            return confine(media_root, ref.path)
        attached = self._read(index).attached.get(ref.path)
        if attached is None:
            raise BadSample("no such media item in its row", path=ref.path)

        def opened(content: Attached) -> NamedBytes:
            return NamedBytes(content.decoded(), content.name or ref.path)

        return open_frames(attached, media_root, opened) if isinstance(attached, FrameList) else opened(attached)

    def fingerprint(self) -> str:
        """Text that changes when rows or the media inside the file change: its name, size and time of change.

        Hashing terabytes to notice an edit takes hours.

        Raises:
            DataError: the file cannot be read.
        """
        try:
            status = self.path.stat()
        except OSError as error:
            raise DataError(f"file cannot be read: {error.strerror}", where=str(self.path)) from error
        return f"{self.path.name}\t{status.st_size}\t{status.st_mtime_ns}"

    def fingerprints_before(self, num_rows: int) -> set[str]:
        """Fingerprints that this file may have had when it ended after its first rows; none where that is unknown."""
        return set()

    def _holds(self, path: str) -> bool:
        """Whether a media item is in this file, or a list of its frames."""
        return path.startswith(f"{self._container}#")

    def _read(self, index: int) -> ReadRow:
        """Row `index` with what stands in it."""
        row = self.row(index)
        row = row if self._mapping is None else self._mapping.apply(row, self._ignored_keys)
        return read_row(row, index, self._container, self._ignored_keys)
