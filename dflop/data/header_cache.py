"""Headers of media files that were read before and have not changed since.

A header costs 0.1-16 ms and, on a busy parallel file system, much more; the answer never changes while the file does
not. The cache is a folder of Parquet files, one per process that read something new, each written whole under a name
no other has: no lock, and a lost or broken file costs nothing but reading again. A file counts as unchanged while its
size and modification time are what they were.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from pathlib import Path

import polars as pl

from dflop import files
from dflop.data.annotations import MediaRef
from dflop.data.frame_files import header_of_source
from dflop.data.headers import BadMedia, read_header
from dflop.data.mixture import Dataset
from dflop.models.media import MediaHeader

_VERSION = 4
"""Raise when headers are read differently: cached ones then no longer match."""
_SCHEMA = {
    "kind": pl.String, "path": pl.String, "size_bytes": pl.Int64, "mtime_ns": pl.Int64, "width_px": pl.Int64,
    "height_px": pl.Int64, "num_frames": pl.Int64, "duration_s": pl.Float64, "reason": pl.String,
}  # fmt: skip

HeaderRow = tuple[str, str, int, int, int, int, int, float, str]
"""Columns of `_SCHEMA`; the reason is why the file is no good, empty for a healthy one."""


class HeaderCache:
    """Reads headers of the media of one dataset, each once per change.

    Args:
        dataset: Whose media.
        folder: Where caches of all datasets lie; None: remember within this process only.
    """

    def __init__(self, dataset: Dataset, folder: Path | None = None) -> None:
        self._dataset = dataset
        roots = sorted({f"{os.path.realpath(e.media_root)}\t{e.name}" for e in dataset.entries})
        name = hashlib.sha256("\n".join([str(_VERSION), *roots]).encode("utf-8", "backslashreplace")).hexdigest()[:16]
        self._folder = folder / name if folder else None
        self._known: dict[tuple[str, str], HeaderRow] = {}
        self._new: dict[tuple[str, str], HeaderRow] = {}
        if self._folder is not None:
            self._load(self._folder)

    def read(self, index: int, ref: MediaRef) -> MediaHeader:
        """Size of a media item of sample `index`.

        Raises:
            BadSample: there is no such item, or its path leaves the media root.
            BadMedia: the file is no good.
        """
        if ref.frames:  # what is remembered has the state of one file
            return header_of_source(ref.kind, self._dataset.open_media(index, ref))
        file = self._dataset.media_file(index, ref)
        try:
            stat = file.stat()
        except (OSError, ValueError):
            return read_header(ref.kind, file)  # which says what is wrong
        key = (ref.kind, f"{file}\t{ref.path}")
        row = self._known.get(key)
        if row is None or row[2:4] != (stat.st_size, stat.st_mtime_ns):
            row = self._known[key] = self._new[key] = (*key, stat.st_size, stat.st_mtime_ns, *self._read(index, ref))
        if reason := row[-1]:
            raise BadMedia(reason)
        return MediaHeader(ref.kind, *row[4:8])

    def take_new(self) -> list[HeaderRow]:
        """What was read since the last call; for a worker process, whose parent saves it."""
        rows = [row for _, row in sorted(self._new.items())]
        self._new.clear()
        return rows

    def save(self, rows: list[HeaderRow]) -> None:
        """Writes rows of `take_new`; a cache that cannot be written is no error."""
        if self._folder is None or not rows:
            return
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with files.replacing(self._folder / f"{uuid.uuid4().hex}.parquet") as temporary:
                pl.DataFrame(rows, schema=_SCHEMA, orient="row").write_parquet(temporary)

    def _read(self, index: int, ref: MediaRef) -> tuple[int, int, int, float, str]:
        try:
            header = header_of_source(ref.kind, self._dataset.open_media(index, ref))
        except BadMedia as error:
            return 0, 0, 0, 0.0, error.reason
        return header.width_px, header.height_px, header.num_frames, header.duration_s, ""

    def _load(self, folder: Path) -> None:
        for file in sorted(folder.glob("*.parquet"), key=_mtime_ns):  # the newest word on a file counts
            try:
                frame = pl.read_parquet(file, columns=list(_SCHEMA))
            except (OSError, pl.exceptions.PolarsError):
                continue
            self._known |= {(row[0], row[1]): row for row in frame.iter_rows()}


def _mtime_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
