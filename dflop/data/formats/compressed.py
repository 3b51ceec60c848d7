"""A whole file as a run of bytes that the page cache holds and this process does not; unpacked if compressed."""

from __future__ import annotations

import gzip
import mmap
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from dflop.errors import DataError

COMPRESSIONS = (".gz", ".zst")

FREE_BYTES = 2**30
MAX_RATIO = 200
"""Annotations pack to a tenth, tables of numbers to a fiftieth; a file made for it unpacks to a hundred thousand times
its size. What is smaller than `FREE_BYTES` unpacked may be anything."""

_CHUNK_BYTES = 2**14
"""Small, because a chunk may unpack to a thousand times its size."""


def mapped(path: Path) -> bytes | mmap.mmap:
    """Content of `path`, unpacked if its last suffix is one of `COMPRESSIONS`.

    Raises:
        DataError: the file cannot be read, is damaged or cut off, there is no room to unpack it, or it unpacks to far
            more than annotations do.
    """
    chunks = {".gz": _gzip_chunks, ".zst": _zstd_chunks}.get(path.suffix.lower())
    try:
        if chunks is None:
            with path.open("rb") as file:
                return _map(file)
        # Unnamed, so gone with its last mapping however this process ends.
        most_bytes = max(FREE_BYTES, MAX_RATIO * path.stat().st_size)
        with tempfile.TemporaryFile() as file:
            for chunk in chunks(path):
                if file.tell() + len(chunk) > most_bytes:
                    raise DataError(
                        f"annotation file decompresses to more than {MAX_RATIO} times its size",
                        where=str(path),
                        hint="if that is right, decompress it and use the decompressed file",
                    )
                file.write(chunk)
            file.flush()
            return _map(file)
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"annotation file cannot be read: {error}", where=str(path)) from error


def _map(file: BinaryIO) -> bytes | mmap.mmap:
    if file.seek(0, 2) == 0:
        return b""  # an empty file cannot be mapped
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _gzip_chunks(path: Path) -> Iterator[bytes]:
    with gzip.open(path) as packed:
        while chunk := packed.read(_CHUNK_BYTES):
            yield chunk


def _zstd_chunks(path: Path) -> Iterator[bytes]:
    """Frame by frame: the library's own reader takes a frame that was cut off for one that ended."""
    decompressor, frame = zstandard.ZstdDecompressor(), None
    with path.open("rb") as packed:
        while chunk := packed.read(_CHUNK_BYTES):
            while chunk:
                frame = frame or decompressor.decompressobj()
                yield frame.decompress(chunk)
                chunk = b""
                if frame.eof:
                    chunk, frame = frame.unused_data, None
    if frame is not None:
        raise EOFError("compressed file ended before the end of its last frame was reached")
