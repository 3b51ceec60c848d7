"""The truth of the store: immutable Parquet files, one per flush, that every job writes on its own.

There is no server and no lock to wait for: a producer (`train-a0-r3`: one process of one attempt) numbers its own
files and never touches one again. A row is acknowledged once its file has its final name and the folder is fsynced.
One file per 1000 rows or minute keeps the ingester's work small: it takes about 1.5 ms per file, however few its rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from dflop.errors import StoreError
from dflop.records import parse_json
from dflop.store import access, durable, schema

FLUSH_ROWS = 1000
FLUSH_AFTER_S = 60.0
TABLE_ROWS = 50_000
"""Rows per file of a table that is written at once."""
NEXT_SEQ_FILE = "next_seq.json"
"""In a folder of the archive: per producer, the number after the last one that was compacted away."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*")
_FILE = re.compile(r"(?P<producer>.+)-(?P<seq>\d{6,})\.parquet")


@dataclass(frozen=True, slots=True, order=True)
class SpoolKey:
    """Identity of a spool file; never used twice."""

    kind: str
    run_id: str
    producer: str
    seq: int

    @property
    def relative_path(self) -> str:
        """Path below `<store>/spool`."""
        return f"{self.kind}/{self.run_id}/{self.producer}-{self.seq:06d}.parquet"

    @property
    def metadata(self) -> dict[bytes, bytes]:
        """What the file itself says it is (Parquet key-value metadata), so that a moved or renamed file is noticed."""
        return {f"dflop.{key}".encode(): str(value).encode() for key, value in dataclasses.asdict(self).items()}

    @classmethod
    def parse(cls, relative_path: str) -> SpoolKey | None:
        """Inverse of `relative_path`; None for any path the spool writer could not have written."""
        kind, _, rest = relative_path.partition("/")
        run_id, _, name = rest.rpartition("/")
        match = _FILE.fullmatch(name)
        if not match or not run_id:
            return None
        key = cls(kind, run_id, match["producer"], int(match["seq"]))
        return key if key.relative_path == relative_path else None


class SpoolWriter:
    """Buffers records per kind and writes each full buffer (`flush_rows`) as one durable spool file.

    Not thread-safe. Rows whose write failed stay buffered: the next `flush` tries them again. `producer` names this
    process, uniquely within the run (with the attempt and rank in it); `/` in a run id makes folders.

    Raises:
        StoreError: `run_id` or `producer` cannot be a file name.
    """

    def __init__(self, store_root: Path | str, run_id: str, producer: str, *, flush_rows: int = FLUSH_ROWS) -> None:
        for what, name in (*(("run id", part) for part in run_id.split("/")), ("producer", producer)):
            if not _NAME.fullmatch(name):
                hint = "use letters, digits and _ . = + -, not starting with a dot or dash"
                raise StoreError(f"{what} `{name}` cannot be part of a file name", hint=hint)
        self._store_root, self._run_id, self._producer = Path(store_root), run_id, producer
        self._flush_rows = flush_rows
        self._buffers: dict[type[Any], list[Any]] = {}
        self._next_seq: dict[str, int] = {}
        self._flushed_at_s = time.monotonic()
        self.num_acknowledged = 0
        """Rows that are durably on disk."""

    def append(self, record: Any) -> None:
        """Buffers one record; writes its kind out when the buffer is full, everything when the last flush is old.

        Raises:
            StoreError: The disk is full or failing; the record stays buffered.
            TypeError: Records of this class have no table.
        """
        cls = type(record)
        if cls not in schema.KINDS.values():
            raise TypeError(f"{cls.__name__} has no table; records with one: {', '.join(schema.KINDS)}")
        buffer = self._buffers.setdefault(cls, [])
        buffer.append(record)
        if time.monotonic() - self._flushed_at_s > FLUSH_AFTER_S:
            self.flush()
        elif len(buffer) >= self._flush_rows:
            self._flush_kind(cls)

    def number(self, cls: type[Any], seq: int) -> None:
        """Gives the next file of a class this number; a number that was used before becomes the next free one."""
        self._next_seq[schema.kind_of(cls)] = seq

    def append_table(self, cls: type[Any], table: pa.Table) -> None:
        """Writes and acknowledges rows that are columns already, of any types that cast to those of the record class.

        Raises:
            StoreError: The disk is full or failing, or a column is missing or of another type; files of
                `TABLE_ROWS` rows that were written before stay.
        """
        wanted = schema.arrow_schema(kind := schema.kind_of(cls))
        for at in range(0, len(table), TABLE_ROWS):
            part = table.slice(at, TABLE_ROWS)
            self._write(kind, part, lambda t: t.select(wanted.names).cast(wanted).combine_chunks())

    def flush(self) -> None:
        """Writes every buffered record; on return all of them are acknowledged.

        Raises:
            StoreError: The disk is full or failing, or a value does not fit its column; unwritten rows stay buffered.
        """
        self._flushed_at_s = time.monotonic()
        for cls in self._buffers:
            self._flush_kind(cls)

    def __enter__(self) -> SpoolWriter:
        return self

    def __exit__(self, *_error: object) -> None:
        self.flush()

    def _flush_kind(self, cls: type[Any]) -> None:
        rows, kind = self._buffers[cls], schema.kind_of(cls)
        if rows:
            self._write(kind, rows, lambda rows: schema.to_table(cls, rows))
            rows.clear()

    def _write(self, kind: str, rows: Any, to_table: Callable[[Any], pa.Table]) -> None:
        folder = self._store_root / "spool" / kind / self._run_id
        try:
            durable.make_folder(folder)
            self._write_numbered(kind, to_table(rows))
        except (OSError, KeyError, ValueError, OverflowError, pa.ArrowException) as error:
            raise _spool_error(error, self._store_root, folder, len(rows)) from error
        self.num_acknowledged += len(rows)

    def _write_numbered(self, kind: str, table: pa.Table) -> None:
        """Writes one file under our next number.

        The folder with the files of all producers is listed once. Whoever else uses our name meanwhile is met where its
        files are: the link is refused, or in the quarantine and below what was compacted the number is taken.
        """
        while True:
            key = SpoolKey(kind, self._run_id, self._producer, self._next_seq.pop(kind, -1))
            if key.seq < 0 or _is_taken_elsewhere(self._store_root, key):
                seq = next_seq(self._store_root, schema.KINDS[kind], self._run_id, self._producer)
                key = dataclasses.replace(key, seq=seq)
            with contextlib.suppress(FileExistsError):  # of another process with our name: ours takes the next number
                durable.write_new(self._store_root / "spool" / key.relative_path, encode(key, table))
                self._next_seq[kind] = key.seq + 1
                return


def spool_rows(store_root: Path | str, run_id: str, producer: str, rows: Iterable[Any]) -> None:
    """Writes all rows of a producer; raises as `SpoolWriter`."""
    with SpoolWriter(store_root, run_id, producer) as spool:
        for row in rows:
            spool.append(row)


def encode(key: SpoolKey, table: pa.Table) -> bytes:
    """Parquet bytes of one spool file, carrying its own key.

    LZ4, because a file of 50 rows is many tiny pages: zstd needs 2 to 3 times as long to read them and saves nothing.
    """
    metadata = {**key.metadata, schema.VERSION_KEY: str(schema.version_of(key.kind)).encode()}
    return durable.parquet(table, metadata, "lz4")


def list_files(
    store_root: Path | str, kind: str = "", on_error: Callable[[OSError], None] | None = None
) -> Iterator[tuple[str, Path]]:
    """Every file, or every one of a kind, that claims to be a spool file, as (path below `spool/`, path)."""
    root = Path(store_root) / "spool"
    for path in durable.list_parquet(root / kind, on_error):
        if path.parent != root:
            yield path.relative_to(root).as_posix(), path


def next_seq(store_root: Path | str, cls: type[Any], run_id: str, producer: str) -> int:
    """Number that the next file of this producer gets; every smaller one was used."""
    root, folder = Path(store_root), f"{schema.kind_of(cls)}/{run_id}"
    used = [read_next_seq(root / "archive" / folder).get(producer, 0) - 1]
    for area in ("spool", "quarantine"):  # numbers of files that are gone from the spool: the manifest may know them
        for path in (root / area / folder).glob(f"{producer}-*.parquet*"):
            match = _FILE.fullmatch(path.name.partition(".parquet")[0] + ".parquet")
            if match and match["producer"] == producer:
                used.append(int(match["seq"]))
    return 1 + max(used)


def _is_taken_elsewhere(store_root: Path, key: SpoolKey) -> bool:
    """Whether a number that is not in the spool any more, or never was, was used before."""
    if key.seq < read_next_seq(store_root / "archive" / key.kind / key.run_id).get(key.producer, 0):
        return True
    path = store_root / "quarantine" / key.relative_path
    return any(path.parent.glob(f"{path.name}*"))


def read_next_seq(folder: Path) -> dict[str, int]:
    """Per producer, the number after the last one that was compacted away.

    Raises:
        StoreError: the file is damaged: a number could be used twice.
    """
    path = folder / NEXT_SEQ_FILE
    try:
        found = parse_json(path.read_bytes())
        return {str(producer): int(seq) for producer, seq in found.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        hint = "restore it, or write the `_seq` that the other files need"
        raise StoreError(f"damaged: {error}", where=str(path), hint=hint) from None


def _spool_error(error: Exception, root: Path, folder: Path, num_rows: int) -> StoreError:
    kept = f"{num_rows} rows stay in memory, no partial file remains"
    full = {errno.ENOSPC: "disk is full", errno.EDQUOT: "disk quota is exceeded"}
    if isinstance(error, OSError) and error.errno in full:
        problem = f"cannot write the spool: the {full[error.errno]}; {kept}"
        return StoreError(problem, where=str(folder), hint="free space, then flush again")
    if access.is_denied(error):
        return access.error_of(f"cannot write the spool; {kept}", error, root)
    return StoreError(f"cannot write the spool: {error}; {kept}", where=str(folder))
