"""Rows of JSON and JSON Lines files, compressed or not.

Opening a file finds where its rows begin and holds nothing else: 16 bytes per row, so ten million rows take 160 MB and
any worker can read any row. A compressed file is unpacked into an unnamed temporary file, which the page cache may
drop. A list of rows (`.json`) is parsed once to find where its elements are, and each again when it is read.
"""

from __future__ import annotations

import codecs
import hashlib
import mmap
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflop.data.annotations import AnnotatedSample, printable
from dflop.data.conversation import ReadRow, read_row
from dflop.data.formats.compressed import COMPRESSIONS, mapped
from dflop.data.formats.embedded import MediaOfRows
from dflop.data.formats.json_rows import element_spans, parse_object
from dflop.errors import ConfigError, DataError

SUFFIXES = tuple(f"{plain}{packed}" for plain in (".json", ".jsonl") for packed in ("", *COMPRESSIONS))


class AnnotationFile(MediaOfRows):
    """Random access to the rows of a `.json` or `.jsonl` file, either one optionally `.gz` or `.zst`."""

    def __init__(
        self, path: Path, data: bytes | mmap.mmap, spans: npt.NDArray[np.int64], ignored_keys: Collection[str] = ()
    ) -> None:
        self.path = path
        self._container = printable(path.name)
        self._ignored_keys = ignored_keys
        self._data = data
        self._spans = spans

    @classmethod
    def open(cls, path: Path, ignored_keys: Collection[str] = ()) -> AnnotationFile:
        """Index the rows of `path` without judging them.

        Raises:
            ConfigError: the suffix is not one we read.
            DataError: the file cannot be read, or a `.json` file is not one list.
        """
        suffix = next((s for s in SUFFIXES if path.name.lower().endswith(s)), None)
        if suffix is None:
            raise ConfigError(
                f"annotation file {path.name} has an unknown suffix",
                where=str(path),
                hint=f"valid: {', '.join(SUFFIXES)}",
            )
        data = mapped(path)
        spans = _line_spans(data) if suffix.startswith(".jsonl") else element_spans(data, path)
        return cls(path, data, spans, ignored_keys)

    def __len__(self) -> int:
        return len(self._spans)

    def row(self, index: int) -> dict[str, Any]:
        """The object of row `index`, not yet interpreted.

        Raises:
            BadSample: the row is not a JSON object.
        """
        start, stop = self._spans[index].tolist()
        return parse_object(self._data[start:stop], f"row at byte {start}")

    def sample(self, index: int) -> AnnotatedSample:
        """Row `index`, interpreted.

        Raises:
            BadSample: the row is malformed; the reason says how.
        """
        return self._read(index).sample

    def _holds(self, path: str) -> bool:
        return path.startswith(f"{self._container}#")

    def _read(self, index: int) -> ReadRow:
        return read_row(self.row(index), index, self._container, self._ignored_keys)

    def fingerprint(self) -> str:
        """Hash of the content of the file as it lies.

        Raises:
            DataError: it cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"file cannot be read: {error.strerror}", where=str(self.path)) from error


def _line_spans(data: bytes | mmap.mmap) -> npt.NDArray[np.int64]:
    """[start, stop) in bytes of the lines that are not blank, of shape (num_rows, 2)."""

    def scan() -> Iterator[int]:
        start = len(codecs.BOM_UTF8) if data[:3] == codecs.BOM_UTF8 else 0
        while start < len(data):
            newline = data.find(b"\n", start)
            stop = len(data) if newline < 0 else newline + 1
            if data[start:stop].strip():
                yield start
                yield stop
            start = stop

    return np.fromiter(scan(), dtype=np.int64).reshape(-1, 2)
