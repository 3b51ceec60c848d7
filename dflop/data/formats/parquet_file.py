"""Parquet as Hugging Face datasets write it: conversations, and media as bytes in the row or as paths.

A media column is named like the keys of a row (`image`, `images`, ...) and holds bytes, {bytes, path}, a path, or a
list of these. Rows are read in windows of about 32 MiB, the last two of which are kept. A row group is the least that
Parquet reads, so rows in order cost little and rows at random cost a row group each: 45 ms and, for a moment, up to
600 MB for row groups of 100 MB of images (measured, warm; a member of a tar takes 0.1 ms). Keep row groups small, or
use tar, where data are to be read in random order. Polars reports damage on stderr, too, before it is a `BadSample`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import polars as pl

from dflop.data.annotations import AnnotatedSample, BadSample, MediaRef, confine, printable
from dflop.data.conversation import CONVERSATION_KEYS, MEDIA_KEYS, ROW_KEYS, parse_row
from dflop.data.formats.embedded import NamedBytes, stat_fingerprint
from dflop.data.headers import MediaSource
from dflop.errors import DataError

_WINDOW_BYTES = 2**25
_MAX_WINDOW_ROWS = 4096
_FAILURES = (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError)


class ParquetFile:
    """Random access to the rows of a `.parquet` file."""

    def __init__(self, path: Path, columns: tuple[str, ...], num_rows: int) -> None:
        self.path = path
        self._prefix = f"{printable(path.name)}#"
        self._columns = columns
        self._num_rows = num_rows
        self._identity = stat_fingerprint(path)
        row_bytes = path.stat().st_size // max(1, num_rows)
        self._window_rows = max(1, min(_MAX_WINDOW_ROWS, _WINDOW_BYTES // max(1, row_bytes)))

    @classmethod
    def open(cls, path: Path) -> ParquetFile:
        """Read the footer of `path`.

        Raises:
            DataError: not a Parquet file, one cut off, or no column of conversations or text.
        """
        try:
            frame = _scan(path)
            columns = frame.collect_schema().names()
            num_rows = int(frame.select(pl.len()).collect().item())
        except _FAILURES as error:
            raise DataError(f"Parquet file cannot be read: {_one_line(error)}", where=str(path)) from error
        if not set(columns) & set(CONVERSATION_KEYS):
            raise DataError(
                f"no column of conversations; there are {', '.join(columns)}",
                where=str(path),
                hint=f"name one of {', '.join(CONVERSATION_KEYS)}",
            )
        return cls(path, tuple(c for c in columns if c in ROW_KEYS), num_rows)

    def __len__(self) -> int:
        return self._num_rows

    def row(self, index: int) -> dict[str, Any]:
        """The columns of row `index` that a row is read from, with names for the media it holds.

        Raises:
            BadSample: the row group cannot be read.
        """
        row = self._values(index)
        for key in set(MEDIA_KEYS) & set(row):
            entries = row[key] if isinstance(row[key], list) else [row[key]]
            names = [self._name(index, key, place, entry) for place, entry in enumerate(entries)]
            row[key] = [name for name in names if name is not None]
        return row

    def sample(self, index: int) -> AnnotatedSample:
        """Row `index`, interpreted.

        Raises:
            BadSample: the row is malformed; the reason says how.
        """
        return parse_row(self.row(index), index)

    def embeds(self, ref: MediaRef) -> bool:
        """Whether its bytes are in this file."""
        return ref.path.startswith(self._prefix)

    def open_media(self, index: int, ref: MediaRef, media_root: Path) -> MediaSource:
        """Bytes of a media item of row `index`, or the path of a file under the media root.

        Raises:
            BadSample: no such item, bytes that are none, or a path that leaves the media root.
        """
        if not self.embeds(ref):
            return confine(media_root, ref.path)
        row = self._values(index)
        for key in set(MEDIA_KEYS) & set(row):
            for place, entry in enumerate(row[key] if isinstance(row[key], list) else [row[key]]):
                if self._name(index, key, place, entry) == ref.path:
                    content = entry if isinstance(entry, bytes) else entry["bytes"]
                    if not isinstance(content, bytes):
                        raise BadSample(f"`bytes` is of type {type(content).__name__}, not binary", path=ref.path)
                    path = entry.get("path") if isinstance(entry, dict) else None
                    return NamedBytes(content, str(path or ref.path))
        raise BadSample("no such media item in its row", path=ref.path)

    def fingerprint(self) -> str:
        """Name, size and time of change.

        Raises:
            DataError: the file cannot be read.
        """
        return stat_fingerprint(self.path)

    def _name(self, index: int, key: str, place: int, entry: Any) -> Any:
        """Name of an entry whose bytes are here, else its path, or None where there is nothing."""
        if isinstance(entry, dict):
            content, path = entry.get("bytes"), entry.get("path")
        else:
            content, path = (entry, None) if isinstance(entry, bytes) else (None, entry)
        return path if content is None else f"{self._prefix}{index}.{key}.{place}"

    def _values(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._num_rows:
            raise IndexError(index)
        start = index - index % self._window_rows
        try:
            try:
                frame = _window(self.path, self._identity, self._columns, start, self._window_rows)
            except _FAILURES:
                # Damage costs the rows of its row group, not those of the neighbours in the window.
                start, frame = index, _window(self.path, self._identity, self._columns, index, 1)
            return frame.row(index - start, named=True)
        except (*_FAILURES, ValueError) as error:
            raise BadSample(f"row cannot be read: {_one_line(error)}") from error


@functools.lru_cache(maxsize=2)  # shared by all files, so that a thousand open shards hold no more than one
def _window(path: Path, identity: str, columns: tuple[str, ...], start: int, num_rows: int) -> pl.DataFrame:
    return _scan(path).select(columns).slice(start, num_rows).collect()


def _scan(path: Path) -> pl.LazyFrame:
    return pl.scan_parquet(path, glob=False, hive_partitioning=False)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
