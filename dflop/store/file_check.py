"""Reads spool files and says of each whether its rows can be believed; knows nothing of the database.

Every file is judged on its own, from bytes read once, so that one truncated file fails alone. A file is good when its
footer names the path it lies under, the schema version and the columns are those of its kind (older versions are
brought forward), every page passes its checksum, rows are as many as the footer says and nothing is null. Files of a
newer dflop are neither good nor bad: they wait for an ingester that knows them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from dflop.store import schema
from dflop.store.spool import SpoolKey

T = TypeVar("T")

BATCH_FILES = 500
BATCH_BYTES = 32 << 20
NUM_THREADS = 2
MIN_CHUNK_ROWS = 10_000
"""Decoding releases the GIL; more threads than this wait for the database."""


class NewerSchemaError(Exception):
    """The file was written by a newer dflop."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the spool or of the archive, or one that claims to be."""

    name: str
    """Path below `spool/` or `archive/`."""
    path: Path
    num_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, root: Path, path: Path) -> StoredFile:
        """The file at `path`, somewhere below `root`."""
        stat = path.stat()
        return cls(path.relative_to(root).as_posix(), path, stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Good:
    """A file whose rows can be ingested."""

    file: StoredFile
    key: SpoolKey
    sha256: str
    table: pa.Table


@dataclass(frozen=True, slots=True)
class Bad:
    """A file that has to leave the spool."""

    file: StoredFile
    sha256: str
    reason: str


@dataclass(frozen=True, slots=True)
class Touched:
    """A file that was ingested before, with the same content, and only has another time (copied, restored)."""

    file: StoredFile
    key: SpoolKey


@dataclass(frozen=True, slots=True)
class Waiting:
    """A file that stays: only a newer dflop can read it, or only other users may."""

    file: StoredFile
    error: NewerSchemaError | PermissionError


Judged = Good | Bad | Touched | Waiting


def judge(file: StoredFile, known_sha256: str | None) -> Judged:
    """Judges one file; `known_sha256` is of what was ingested under its name before, if anything was."""
    try:
        data = file.path.read_bytes()
    except PermissionError as error:
        return Waiting(file, error)
    sha256 = hashlib.sha256(data).hexdigest()
    key = SpoolKey.parse(file.name)
    if key is not None and sha256 == known_sha256:
        return Touched(file, key)
    try:
        if key is None:
            raise ValueError("not a path <kind>/<run_id>/<producer>-<seq>.parquet")
        if known_sha256:
            raise ValueError(f"content differs from what was ingested under this name (sha256 {known_sha256})")
        return Good(file, key, sha256, decode(key, data))
    except NewerSchemaError as error:
        return Waiting(file, error)
    except (ValueError, OSError, pa.ArrowException) as error:  # the bytes are in memory: OSError is corrupt Parquet
        return Bad(file, sha256, (str(error).splitlines() or [type(error).__name__])[0])


def judge_all(files: Iterable[StoredFile], known: Mapping[str, str]) -> Iterator[list[Judged]]:
    """Judges files in batches for one transaction each; the next one is read while the caller works on this one."""
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="dflop-check") as pool:
        ahead: list[Future[Judged]] = []
        for batch in (*batches(files, lambda file: file.num_bytes, BATCH_BYTES, BATCH_FILES), []):
            futures = [pool.submit(judge, file, known.get(file.name)) for file in batch]
            if ahead:
                yield [future.result() for future in ahead]
            ahead = futures


def decode(key: SpoolKey, data: bytes) -> pa.Table:
    """Rows of a spool file in the columns of today's schema.

    Raises:
        NewerSchemaError: A kind or schema version this dflop does not know.
        ValueError, OSError, pyarrow.ArrowException: What is wrong with the file.
    """
    reader = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
    found = reader.metadata.metadata or {}
    for name, expected in key.metadata.items():
        if found.get(name) != expected:
            raise ValueError(f"{name.decode()} in the file is {found.get(name)!r}, expected {expected!r}")
    version, of_today = schema.file_version(found), schema.version_of(key.kind)
    if key.kind in schema.RETIRED:
        return schema.upgrade(key.kind, version, pa.table({}))
    if key.kind not in schema.KINDS:
        raise NewerSchemaError(f"kind `{key.kind}` is not known to this dflop")
    if version > of_today:
        raise NewerSchemaError(f"schema version {version} of `{key.kind}`, this dflop knows {of_today}")
    table = schema.upgrade(key.kind, version, reader.read(use_threads=False))
    if not table.schema.equals(schema.arrow_schema(key.kind)):
        raise ValueError(f"columns {table.schema.names} do not match schema version {version} of `{key.kind}`")
    if table.num_rows != reader.metadata.num_rows:
        raise ValueError(f"{table.num_rows} rows found, the footer has {reader.metadata.num_rows}")
    nulls = [name for name in table.schema.names if table.column(name).null_count]
    if nulls:
        raise ValueError(f"columns {nulls} hold nulls")
    return table


def with_provenance(files: Iterable[Good]) -> pa.Table:
    """Rows of files of one kind, one after the other, with the columns that say which file each came from."""
    files = list(files)
    table = pa.concat_tables([f.table.replace_schema_metadata() for f in files])
    for column, value in (("_run_id", "run_id"), ("_producer", "producer"), ("_seq", "seq")):
        chunks = [pa.repeat(pa.scalar(getattr(f.key, value)), f.table.num_rows) for f in files]
        table = table.append_column(column, pa.chunked_array(chunks))
    # DuckDB takes one long chunk three times faster than 500 short ones, but works on several long ones in parallel.
    return table.combine_chunks() if table.num_rows < MIN_CHUNK_ROWS * len(files) else table


def batches(items: Iterable[T], size: Callable[[T], int], max_bytes: int, max_items: int = 0) -> Iterator[list[T]]:
    """Items in order, as many at a time as fit; one that is too large alone."""
    batch: list[T] = []
    num_bytes = 0
    for item in items:
        if batch and (len(batch) == max_items or num_bytes + size(item) > max_bytes):
            yield batch
            batch, num_bytes = [], 0
        batch.append(item)
        num_bytes += size(item)
    if batch:
        yield batch
