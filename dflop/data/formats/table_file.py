"""Parquet and Arrow as Hugging Face datasets write them, CSV and TSV: conversations, and media as bytes or as paths.

Media are bytes, {bytes, path} or a path, in a column named like the keys of a row (`image`, `images`, ...), which may
hold lists of them, or in a part of a message. All columns but those of `ignored_keys` are read: one that holds media in
another place is a reason against its row. Rows are read in windows of about 32 MiB, the last two of
which are kept. A row group is the least that Parquet reads, so rows in order cost little and rows at random cost a row
group each: 45 ms and, for a moment, up to 600 MB for row groups of 100 MB of images (measured, warm; a member of a tar
takes 0.1 ms). Keep row groups small, or use tar, where data are to be read in random order. An Arrow file is mapped
into memory, a table of text held there. Polars reports damage on stderr, too, before it is a `BadSample`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import polars as pl

from dflop.data.annotations import BadSample
from dflop.data.formats.row_mapping import RowMapping
from dflop.data.formats.row_source import RowSource
from dflop.data.row_keys import CONVERSATION_KEYS
from dflop.errors import DataError

_WINDOW_BYTES = 2**25
_MAX_WINDOW_ROWS = 4096
_FAILURES = (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError)
TABLES = (".parquet", ".arrow", *(f"{plain}{packed}" for plain in (".csv", ".tsv") for packed in ("", ".gz", ".zst")))


class TableFile(RowSource):
    """Random access to the rows of a file of `TABLES`, of which columns are named and rows counted first.

    Raises:
        DataError: not such a file, one cut off, or no column of conversations or text.
    """

    def __init__(self, path: Path, ignored_keys: Collection[str] = (), mapping: RowMapping | None = None) -> None:
        super().__init__(path, ignored_keys, mapping)
        try:
            self._identity = _identity(path)
            frame = _scan(path, self._identity)
            columns = frame.collect_schema().names()
            self._num_rows = int(frame.select(pl.len()).collect().item())
            row_bytes = path.stat().st_size // max(1, self._num_rows)
        except _FAILURES as error:
            what = {".parquet": "Parquet", ".arrow": "Arrow"}.get(path.suffix.lower(), "text")
            raise DataError(f"{what} file cannot be read: {_one_line(error)}", where=str(path)) from error
        if mapping is None and not set(columns) & set(CONVERSATION_KEYS):
            raise DataError(
                f"no conversation column; columns are {', '.join(columns)}",
                where=str(path),
                hint=f"add one of {', '.join(CONVERSATION_KEYS)}",
            )
        self._columns = tuple(c for c in columns if c not in ignored_keys)
        self._window_rows = max(1, min(_MAX_WINDOW_ROWS, _WINDOW_BYTES // max(1, row_bytes)))

    def __len__(self) -> int:
        return self._num_rows

    def row(self, index: int) -> dict[str, Any]:
        """The columns of row `index` that say something about it, media as they stand.

        Raises:
            BadSample: the row group cannot be read.
            IndexError: there is no such row.
        """
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
        except _FAILURES as error:
            raise BadSample(f"row cannot be read: {_one_line(error)}") from error


@functools.lru_cache(maxsize=2)  # shared by all files, so that a thousand open shards hold no more than one
def _window(path: Path, identity: str, columns: tuple[str, ...], start: int, num_rows: int) -> pl.DataFrame:
    return _scan(path, identity).select(columns).slice(start, num_rows).collect()


def _scan(path: Path, identity: str) -> pl.LazyFrame:
    if path.name.lower().endswith(".parquet"):
        return pl.scan_parquet(path, glob=False, hive_partitioning=False)
    return _table(path, identity).lazy()


@functools.lru_cache(maxsize=8)
def _table(path: Path, identity: str) -> pl.DataFrame:
    """An Arrow file, whose pages are shared and may be dropped, or a table of text as strings."""
    name = path.name.lower()
    if name.endswith(".arrow"):
        from pyarrow import ArrowInvalid, ipc, memory_map

        mapped = memory_map(str(path))
        try:
            frame = pl.from_arrow(ipc.open_stream(mapped).read_all())  # as save_to_disk writes it
        except ArrowInvalid:
            frame = pl.from_arrow(ipc.open_file(mapped).read_all())
        assert isinstance(frame, pl.DataFrame)
        return frame
    separator = "\t" if ".tsv" in name else ","
    first = path.open("rb").readline() if name.endswith(".tsv") else b""
    quote = None if first.startswith(b"client_id\t") else '"'  # Common Voice has sentences that begin with a mark
    return pl.read_csv(path, separator=separator, quote_char=quote, infer_schema=False)


def _identity(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
