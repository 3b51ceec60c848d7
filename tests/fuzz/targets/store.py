"""The store's own files, as a full disk, a bad copy or somebody's script leaves them.

A spool file is in the tables or in quarantine with its reason, and one that is damaged costs no other one anything.
"""

from __future__ import annotations

import functools
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from dflop.records import Correction
from dflop.store import lease, schema, snapshot
from dflop.store.check import Bad, Good, Judged, SpoolFile, judge, with_provenance
from dflop.store.collect import gc
from dflop.store.compact import compact
from dflop.store.health import lease_health, live_health, snapshot_health
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.settings import read_settings
from dflop.store.spool import SpoolKey, SpoolWriter, encode
from dflop.store.verify import verify
from tests.fuzz import hostile
from tests.fuzz.target import Target, attempt

_KEY = SpoolKey("correction", "run", "bad", 0)
_METADATA = {key.decode(): value.decode() for key, value in _KEY.metadata.items()} | {"dflop.schema_version": "2"}


def _rows() -> list[Correction]:
    return [Correction("run", step, "llm", "table", 1.0, 0.1, 8, 1000.0 + step, level=1.0) for step in range(3)]


@functools.cache
def _spool_file() -> bytes:
    return encode(_KEY, schema.to_table(Correction, _rows()))


def make_store(root: Path) -> Path:
    """A store with three published rows, two files of which are compacted."""
    for seq in range(3):
        with SpoolWriter(root, "run", "good") as spool:
            spool.append(_rows()[seq])
        if seq == 1:
            ingest(root)
            compact(root, min_files=2, min_age_s=0)
    ingest(root)
    return root


@functools.cache
def _store_folder() -> tempfile.TemporaryDirectory[str]:
    """Folder of a sound store, made once and gone with the process; examples work on copies."""
    folder = tempfile.TemporaryDirectory(prefix="dflop-fuzz-store-")
    make_store(Path(folder.name) / "store")
    return folder


def _store() -> Path:
    return Path(_store_folder().name) / "store"


def _copied(folder: Path) -> Path:
    root = folder / "store"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(_store(), root, symlinks=True)
    return root


def _ingested(root: Path) -> int:
    with Reader(root) as reader:
        return len(reader.records(Correction))


def _judged(name: str, data: bytes, folder: Path) -> Judged:
    """What is said of a file; rows that are believed become records and rows of a table."""
    path = folder / "file.parquet"
    path.write_bytes(data)
    found = judge(SpoolFile(name, path, len(data), 0), None)
    if isinstance(found, Good):
        schema.from_table(schema.KINDS[found.key.kind], found.table)
        assert len(with_provenance([found])) == found.table.num_rows
    elif isinstance(found, Bad):
        assert found.reason.strip(), "a reason without words"
        assert len(found.reason.splitlines()) == 1, "a reason of several lines"
    return found


def _judge_bytes(folder: Path) -> Callable[[Any], None]:
    return lambda data: _judged(_KEY.relative_path, data, folder) and None


def _judge_table(folder: Path) -> Callable[[Any], None]:
    def check(example: Any) -> None:
        data = _as_parquet(example)
        if data is not None:
            _judged(_KEY.relative_path, data, folder)

    return check


def _ingest(folder: Path) -> Callable[[Any], None]:
    """Several files at once, sound ones among them, through a whole pass."""

    def check(example: list[tuple[str, bytes]]) -> None:
        root, files = _copied(folder), dict(example)
        for name, data in files.items():
            path = root / "spool" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        with SpoolWriter(root, "run", "other") as spool:
            spool.append(_rows()[0])
        report = ingest(root)
        found = report.num_files + report.num_quarantined_files + report.num_newer_files
        assert found == len(list((root / "spool").rglob("*.parquet"))) - 1 + report.num_quarantined_files
        assert report.num_quarantined_files == len(list((root / "quarantine").rglob("*.reason.json")))
        assert _ingested(root) == 3 + report.num_rows, "rows that were acknowledged are gone"
        assert ingest(root).num_files == 0, "a file was taken twice"

    return check


def _as_parquet(example: tuple[dict[str, Any], dict[str, str]]) -> bytes | None:
    columns, metadata = example
    try:
        table = pa.table({str(name): pa.array(values) for name, values in columns.items()})
        sink = io.BytesIO()
        pq.write_table(table.replace_schema_metadata(metadata), sink)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
        return None
    return sink.getvalue()


def _tables() -> st.SearchStrategy[Any]:
    sound = {name: column.to_pylist() for name, column in zip(
        schema.arrow_schema("correction").names, schema.to_table(Correction, _rows()).columns,
        strict=True)}  # fmt: skip
    metadata = st.one_of(
        st.just(_METADATA),
        hostile.broken(_METADATA, hostile.TEXTS, max_edits=1).map(lambda m: {str(k): str(v) for k, v in m.items()}),
        st.sampled_from(("1", "2", "3", "0", "-1", "02", "99999999999")).map(
            lambda v: {**_METADATA, "dflop.schema_version": v}
        ),
    )
    return st.tuples(st.just(sound) | hostile.broken(sound), metadata)


_FILES: dict[str, Any] = {
    "CURRENT": None,
    "store.json": {"live": "", "keep_snapshots": 5, "grace_s": 3600.0, "lease_s": 120.0},
    "archive/correction/run/next_seq.json": {"good": 2},
    "INGEST.lease/000001.json": {"pid": 1, "host": "h", "since": "2026-01-01T00:00:00Z", "is_released": True,
    "boot_id": "x"},
    "INGEST.lease/999999.json": {"pid": 1, "host": "h", "since": "2026-01-01T00:00:00Z", "is_released": True,
    "boot_id": "x"},
    "INGEST.lock": {"pid": 1, "host": "h", "since": "x"},
    "quarantine/correction/run/a-000000.parquet.0123456789ab.reason.json":
        {"path": "correction/run/a-000000.parquet", "sha256": "0123456789ab", "num_bytes": 3, "reason": "r",
        "quarantined_at_s": 1.0},
}  # fmt: skip


def _jsons() -> st.SearchStrategy[tuple[str, bytes]]:
    current = json.loads((_store() / "CURRENT").read_text())

    def of(name: str) -> st.SearchStrategy[tuple[str, bytes]]:
        sound = _FILES[name] or current
        contents = st.one_of(
            hostile.broken(sound).map(lambda v: json.dumps(v).encode()),
            hostile.VALUES.map(lambda v: json.dumps(v).encode()),
            hostile.broken_bytes([json.dumps(sound).encode()]), st.sampled_from((b"", b"[" * 3000, b"9" * 5000,
            b"\xff\xfe")),
        )  # fmt: skip
        return st.tuples(st.just(name), contents)

    return st.sampled_from(sorted(_FILES)).flatmap(of)


def _beside(folder: Path) -> Callable[[Any], None]:
    def check(example: tuple[str, bytes]) -> None:
        name, data = example
        root = _copied(folder)
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        if name.startswith("quarantine"):
            path.with_name(path.name.removesuffix(".reason.json")).write_bytes(b"abc")
        use(root)

    return check


def use(root: Path) -> None:
    """Everything that reads a store's files, in the order in which people meet them."""
    attempt(read_settings, root)
    current = attempt(snapshot.read_current, root)
    if current is not None:
        opened = attempt(snapshot.open_current, root)
        if opened is not None:
            opened[0].close()
    for ask in (snapshot_health, live_health, lease_health):
        attempt(ask, root)
    with_writer = SpoolWriter(root, "run", "good")
    with_writer.append(_rows()[0])
    attempt(with_writer.close)
    attempt(ingest, root, lock_timeout_s=0.1)
    shutil.rmtree(root / lease.FOLDER, ignore_errors=True)  # whoever is believed to hold it: the rest would wait
    attempt(verify, root)
    attempt(gc, root)


_BINARY = (
    "archive/correction/run/000000.parquet",
    "publishes/000001.parquet",
    "snapshots/dflop-000002.duckdb",
    "live/dflop.duckdb",
)


def _damaged() -> st.SearchStrategy[tuple[str, bytes]]:
    def of(name: str) -> st.SearchStrategy[tuple[str, bytes]]:
        data = (_store() / name).read_bytes()
        return st.tuples(st.just(name), hostile.broken_bytes([data[:8192]] if len(data) > 100_000 else [data]))

    return st.sampled_from([name for name in _BINARY if (_store() / name).is_file()]).flatmap(of)


def _binary(folder: Path) -> Callable[[Any], None]:
    def check(example: tuple[str, bytes]) -> None:
        name, data = example
        root = _copied(folder)
        whole = (root / name).read_bytes()
        (root / name).unlink()  # snapshots may not be written to
        (root / name).write_bytes(data + whole[8192:] if len(whole) > 100_000 else data)
        use(root)

    return check


_NAMES = st.one_of(
    st.sampled_from(("correction/run/a-000000.parquet", "correction/run/a.parquet", "correction/-000001.parquet",
                     "x/y/z-000000.parquet",
                     "correction/run/../a-000000.parquet", "correction/run/a-0.parquet",
                     "correction/run/a-٣٣٣٣٣٣.parquet",
                     "correction/a b/c-000001.parquet", "correction/run/a-99999999999999999999.parquet",
                     "correction/r\nn/p-000000.parquet")),
    hostile.TEXTS.map(lambda t: f"correction/run/{t.replace(chr(0), '').replace('/', '')[:60]}-000000.parquet"),
)  # fmt: skip

TARGETS = (
    Target("spool-bytes", "bytes of spool files broken", lambda: hostile.broken_bytes([_spool_file()]), _judge_bytes),
    Target("spool-tables", "spool files with other columns, types and footers", _tables, _judge_table),
    Target(
        "ingest",
        "names and bytes of spool files, several at once, through an ingest",
        lambda: st.lists(
            st.tuples(_NAMES, st.just(_spool_file()) | hostile.broken_bytes([_spool_file()])), min_size=1, max_size=20
        ),
        _ingest,
        quick=2,
        deadline_s=60,
    ),
    Target("store-json", "CURRENT, settings, leases, locks, reasons", _jsons, _beside, quick=3, deadline_s=60),
    Target(
        "store-binary",
        "bytes of archives, logs of publishes, snapshots, the live database",
        _damaged,
        _binary,
        quick=2,
        deadline_s=60,
    ),
)
