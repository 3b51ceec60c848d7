"""The store's own files, as a full disk, a bad copy or somebody's script leaves them.

A spool file is in the tables or in quarantine with its reason, and one that is damaged costs no other one anything.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from dflop.records import Correction
from dflop.store import lease, schema, snapshot
from dflop.store.check import Bad, Good, SpoolFile, judge, with_provenance
from dflop.store.collect import gc
from dflop.store.compact import compact
from dflop.store.health import lease_health, live_health, snapshot_health
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.settings import read_settings
from dflop.store.spool import SpoolKey, SpoolWriter, encode
from dflop.store.verify import verify
from tests.fuzz import hostile
from tests.fuzz.target import Strategy, Target, attempt, check_reason
from tests.fuzz.targets.dataset import write_parquet

_KEY = SpoolKey("correction", "run", "bad", 0)
_METADATA = {key.decode(): value.decode() for key, value in _KEY.metadata.items()} | {"dflop.schema_version": "2"}
_ROWS = tuple(Correction("run", step, "llm", "table", 1.0, 0.1, 8, 1000.0 + step, level=1.0) for step in range(3))
_REASON = "quarantine/correction/run/a-000000.parquet.0123456789ab.reason.json"
_CLAIM = {"pid": 1, "host": "h", "since": "2026-01-01T00:00:00Z", "is_released": True, "boot_id": "x"}
_JSON: dict[str, dict[str, Any]] = {
    "store.json": {"live": "", "keep_snapshots": 5, "grace_s": 3600.0, "lease_s": 120.0},
    "archive/correction/run/next_seq.json": {"good": 2},
    "INGEST.lease/000001.json": _CLAIM,
    "INGEST.lease/999999.json": _CLAIM,
    "INGEST.lock": {"pid": 1, "host": "h", "since": "x"},
    _REASON: {"path": "correction/run/a-000000.parquet", "sha256": "0123456789ab", "num_bytes": 3, "reason": "r",
              "quarantined_at_s": 1.0},
}  # fmt: skip
_BINARY = (
    "archive/correction/run/000000.parquet", "publishes/000001.parquet", "snapshots/dflop-000002.duckdb",
    "live/dflop.duckdb",
)  # fmt: skip


def make_store(root: Path) -> Path:
    """A store with three published rows, two files of which are compacted."""
    for seq in range(3):
        with SpoolWriter(root, "run", "good") as spool:
            spool.append(_ROWS[seq])
        if seq == 1:
            ingest(root)
            compact(root, min_files=2, min_age_s=0)
    ingest(root)
    return root


@functools.cache
def _sound_store() -> tempfile.TemporaryDirectory[str]:
    """Folder of a store, made once and gone with the process; examples work on copies."""
    folder = tempfile.TemporaryDirectory(prefix="dflop-fuzz-store-")
    make_store(Path(folder.name) / "store")
    return folder


def _sound() -> Path:
    return Path(_sound_store().name) / "store"


def _copied(folder: Path) -> Path:
    root = folder / "store"
    shutil.rmtree(root, ignore_errors=True)
    return Path(shutil.copytree(_sound(), root, symlinks=True))


def _spool_files() -> st.SearchStrategy[bytes]:
    return hostile.broken_bytes([_spool_file()])


def _spool_file() -> bytes:
    return encode(_KEY, schema.to_table(Correction, list(_ROWS)))


def _judge(folder: Path, data: bytes) -> None:
    """What is said of a file; rows that are believed become records and rows of a table."""
    path = folder / "file.parquet"
    path.write_bytes(data)
    found = judge(SpoolFile(_KEY.relative_path, path, len(data), 0), None)
    if isinstance(found, Good):
        schema.from_table(schema.KINDS[found.key.kind], found.table)
        assert len(with_provenance([found])) == found.table.num_rows
    elif isinstance(found, Bad):
        check_reason(found.reason)


def _tables() -> Strategy:
    table = schema.to_table(Correction, list(_ROWS))
    sound = dict(zip(table.column_names, (column.to_pylist() for column in table.columns), strict=True))
    texts = hostile.broken(_METADATA, hostile.TEXTS).map(lambda m: {str(key): str(value) for key, value in m.items()})
    versions = st.sampled_from(("1", "2", "3", "0", "-1", "02", "99999999999"))
    metadata = texts | versions.map(lambda version: {**_METADATA, "dflop.schema_version": version})
    return st.tuples(st.just(sound) | hostile.broken(sound), st.just(_METADATA) | metadata)


def _judge_table(folder: Path, example: tuple[dict[str, Any], dict[str, str]]) -> None:
    path = write_parquet(folder, *example)
    if path is not None:
        _judge(folder, path.read_bytes())


def _named_files() -> Strategy:
    sound = st.sampled_from((
        "correction/run/a-000000.parquet", "correction/run/a.parquet", "correction/-000001.parquet",
        "x/y/z-000000.parquet", "correction/run/../a-000000.parquet", "correction/run/a-0.parquet",
        "correction/run/a-٣٣٣٣٣٣.parquet", "correction/a b/c-000001.parquet", "correction/r\nn/p-000000.parquet",
        "correction/run/a-99999999999999999999.parquet",
    ))  # fmt: skip
    words = hostile.TEXTS.map(lambda text: text.replace("\0", "").replace("/", "")[:60])
    names = sound | words.map(lambda word: f"correction/run/{word}-000000.parquet")
    return st.lists(st.tuples(names, st.just(_spool_file()) | _spool_files()), min_size=1, max_size=20)


def _ingest(folder: Path, example: list[tuple[str, bytes]]) -> None:
    """Several files at once, sound ones among them, through a whole pass."""
    root = _copied(folder)
    for name, data in dict(example).items():
        path = root / "spool" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with SpoolWriter(root, "run", "other") as spool:
        spool.append(_ROWS[0])
    report = ingest(root)
    found = report.num_files + report.num_quarantined_files + report.num_newer_files
    assert found == len(list((root / "spool").rglob("*.parquet"))) - 1 + report.num_quarantined_files
    assert report.num_quarantined_files == len(list((root / "quarantine").rglob("*.reason.json")))
    with Reader(root) as reader:
        assert len(reader.records(Correction)) == 3 + report.num_rows, "rows that were acknowledged are gone"
    assert ingest(root).num_files == 0, "a file was taken twice"


def _jsons() -> Strategy:
    sound = {"CURRENT": json.loads((_sound() / "CURRENT").read_text()), **_JSON}
    return st.sampled_from(sorted(sound)).flatmap(
        lambda name: st.tuples(st.just(name), hostile.broken_json(sound[name]))
    )


def _json(folder: Path, example: tuple[str, bytes]) -> None:
    name, data = example
    root = _copied(folder)
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if name == _REASON:
        path.with_name(path.name.removesuffix(".reason.json")).write_bytes(b"abc")
    _use(root)


def _head(data: bytes) -> bytes:
    return data[:8192] if len(data) > 100_000 else data


def _damages() -> Strategy:
    """(file, the beginning of it broken)."""
    found = {name: _head((_sound() / name).read_bytes()) for name in _BINARY}
    return st.sampled_from(_BINARY).flatmap(lambda name: st.tuples(st.just(name), hostile.broken_bytes([found[name]])))


def _damaged(folder: Path, example: tuple[str, bytes]) -> None:
    name, data = example
    root = _copied(folder)
    whole = (root / name).read_bytes()
    (root / name).unlink()  # snapshots may not be written to
    (root / name).write_bytes(data + whole[len(_head(whole)) :])
    _use(root)


def _use(root: Path) -> None:
    """Everything that reads a store's files, in the order in which people meet them."""
    attempt(read_settings, root)
    if (
        attempt(snapshot.read_current, root) is not None
        and (opened := attempt(snapshot.open_current, root)) is not None
    ):
        opened[0].close()
    for ask in (snapshot_health, live_health, lease_health):
        attempt(ask, root)
    writer = SpoolWriter(root, "run", "good")
    writer.append(_ROWS[0])
    attempt(writer.close)
    attempt(ingest, root, lock_timeout_s=0.1)
    shutil.rmtree(root / lease.FOLDER, ignore_errors=True)  # whoever is believed to hold it: the rest would wait
    attempt(verify, root)
    attempt(gc, root)


_slow = partial(Target, deadline_s=60)
_MANY = "names and bytes of spool files, several at once, through an ingest"
_FILES = "bytes of archives, logs of publishes, snapshots, the live database"
TARGETS = (
    Target("spool-bytes", "bytes of spool files broken", _spool_files, _judge),
    Target("spool-tables", "spool files with other columns, types and footers", _tables, _judge_table),
    _slow("ingest", _MANY, _named_files, _ingest, quick=2),
    _slow("store-json", "CURRENT, settings, leases, locks, reasons", _jsons, _json, quick=3),
    _slow("store-binary", _FILES, _damages, _damaged, quick=2),
)
