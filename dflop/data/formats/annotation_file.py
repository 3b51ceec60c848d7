"""Rows of JSON and JSON Lines files, compressed or not.

Opening a file finds where its rows begin and holds nothing else: 16 bytes per row, so ten million rows take 160 MB and
any worker can read any row. A compressed file is unpacked into an unnamed temporary file, which the page cache may
drop. A `.json` holds one object per line, a list of rows, or an object with one such list. A list is parsed once to
find where its elements are, and each again when it is read.
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

from dflop.data.formats.compressed import COMPRESSIONS, mapped
from dflop.data.formats.json_rows import element_spans, lists_of, parse_object
from dflop.data.formats.row_mapping import RowMapping
from dflop.data.formats.row_source import RowSource
from dflop.errors import DataError

_LINES = tuple(f"{plain}{packed}" for plain in (".jsonl", ".ndjson") for packed in ("", *COMPRESSIONS))
SUFFIXES = (*(f".json{packed}" for packed in ("", *COMPRESSIONS)), *_LINES)

_FIRST_BYTES = 2**12


class AnnotationFile(RowSource):
    """Random access to the rows of a `.json` or `.jsonl` file, either one optionally `.gz` or `.zst`.

    Raises:
        DataError: the file cannot be read, or a `.json` file holds no list of rows, or several and none is named.
    """

    def __init__(self, path: Path, ignored_keys: Collection[str] = (), mapping: RowMapping | None = None) -> None:
        super().__init__(path, ignored_keys, mapping)
        self._data = mapped(path)
        lists = {"": self._data} if path.name.lower().endswith(_LINES) else lists_of(self._data, path)
        if len(lists) > 1 and mapping is None:
            raise DataError(
                f"holds several lists: {', '.join(lists)}", where=str(path), hint="dataset.split: one of them"
            )
        name = mapping.list_name if mapping is not None and mapping.list_name in lists else next(iter(lists), None)
        self._data = self._data if name is None else lists[name]
        self._spans = element_spans(self._data, path) if name is None else _line_spans(self._data)

    def __len__(self) -> int:
        return len(self._spans)

    def row(self, index: int) -> dict[str, Any]:
        """The object of row `index`, not yet interpreted.

        Raises:
            BadSample: the row is not a JSON object.
        """
        start, stop = self._spans[index].tolist()
        return parse_object(self._data[start:stop], f"row at byte {start}")

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

    def fingerprints_before(self, num_rows: int) -> set[str]:
        """Fingerprints of the first rows of JSON Lines, with and without the blank lines that follow."""
        if not self.path.name.lower().endswith(".jsonl"):
            return set()
        last, following = int(self._spans[num_rows - 1, 1]), int(self._spans[num_rows, 0])
        ends = {last, following, last - self._data[:last].endswith(b"\n")}
        return {hashlib.sha256(self._data[:end]).hexdigest() for end in ends}


def list_names(path: Path) -> tuple[str, ...]:
    """Names of the lists of rows that a `.json` file holds, if it is an object of them.

    Raises:
        DataError: it is damaged.
        OSError: it cannot be read.
    """
    if path.suffix.lower() != ".json":
        return ()
    with path.open("rb") as file:  # a list may be large, and this is asked often
        is_object = file.read(_FIRST_BYTES).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{")
    return tuple(lists_of(mapped(path), path)) if is_object else ()


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
