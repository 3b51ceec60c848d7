"""The store's own files, as a full disk, a bad copy or somebody's script leaves them, and its console of SQL.

A spool file is in the tables or in quarantine with its reason, and one that is damaged costs no other one anything.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from dflop.records import Correction
from dflop.report.rows import print_rows
from dflop.store import console, lease, schema, settings, snapshot
from dflop.store.file_check import Bad, Good, StoredFile, judge, with_provenance
from dflop.store.health import lease_health, live_health, snapshot_health
from dflop.store.ingest import ingest
from dflop.store.maintenance import compact, gc
from dflop.store.reader import Reader
from dflop.store.rebuild import verify
from dflop.store.spool import SpoolKey, SpoolWriter, encode
from tests.fuzz import hostile
from tests.fuzz.target import Strategy, Target, attempt, check_reason, made
from tests.fuzz.targets.dataset import write_parquet

_KEY = SpoolKey("correction", "run", "bad", 0)
_METADATA = {key.decode(): value.decode() for key, value in _KEY.metadata.items()} | {"dflop.schema_version": "2"}
_ROWS = tuple(Correction("run", step, "llm", "table", 1.0, 0.1, 8, 1000.0 + step, level=1.0) for step in range(3))


def make_store(root: Path) -> None:
    """A store with three published rows, two files of which are compacted, and one of a stranger in quarantine."""
    settings.init(root)
    for seq in range(3):
        with SpoolWriter(root, "run", "good") as spool:
            spool.append(_ROWS[seq])
        if seq == 1:
            ingest(root)
            compact(root, min_files=2, min_age_s=0)
            (root / "spool/correction/run/a-000000.parquet").write_bytes(b"abc")
    ingest(root)


def _copied(folder: Path) -> Path:
    root = folder / "store"
    shutil.rmtree(root, ignore_errors=True)
    return Path(shutil.copytree(made(make_store), root, symlinks=True))


def _names(*, are_json: bool) -> list[str]:
    """Of the files of that store, but for its spool."""
    files = (path.relative_to(made(make_store)) for path in sorted(made(make_store).rglob("*")) if path.is_file())
    files = (path for path in files if path.parts[0] != "spool" and path.name != "ingest.lock")
    return [str(path) for path in files if (path.suffix == ".json" or path.name == "CURRENT") is are_json]


def _judge(folder: Path, data: bytes) -> None:
    """What is said of a file; rows that are believed become records and rows of a table."""
    path = folder / "file.parquet"
    path.write_bytes(data)
    found = judge(StoredFile(_KEY.relative_path, path, len(data), 0), None)
    if isinstance(found, Good):
        schema.from_table(schema.KINDS[found.key.kind], found.table)
        assert len(with_provenance([found])) == found.table.num_rows
    elif isinstance(found, Bad):
        check_reason(found.reason)


def _judge_table(folder: Path, example: tuple[dict[str, Any], dict[str, str]]) -> None:
    path = write_parquet(folder, *example)
    if path is not None:
        _judge(folder, path.read_bytes())


def _ingest(folder: Path, example: list[tuple[str, bytes]]) -> None:
    """Several files at once, sound ones among them, through a whole pass."""
    root = _copied(folder)
    for name, data in dict(example).items():
        path = root / "spool" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with SpoolWriter(root, "run", "other") as spool:
        spool.append(_ROWS[0])
    before = len(list((root / "quarantine").rglob("*.reason.json")))
    report = ingest(root)
    found = report.num_files + report.num_quarantined_files + report.num_newer_files
    assert found == len(list((root / "spool").rglob("*.parquet"))) - 1 + report.num_quarantined_files
    assert report.num_quarantined_files == len(list((root / "quarantine").rglob("*.reason.json"))) - before
    with Reader(root) as reader:
        assert len(reader.records(Correction)) == 3 + report.num_rows, "rows that were acknowledged are gone"
    assert ingest(root).num_files == 0, "a file was taken twice"


def _head(data: bytes) -> bytes:
    """All of a small file; of a database its headers."""
    return data[:8192] if len(data) > 100_000 else data


def _damaged(folder: Path, example: tuple[str, bytes]) -> None:
    name, data = example
    root = _copied(folder)
    path = root / name
    whole = path.read_bytes()
    path.unlink()  # snapshots may not be written to
    path.write_bytes(data + whole[len(_head(whole)) :])
    # Everything that reads a store's files, in the order in which people meet them.
    attempt(settings.read_settings, root)
    opened = attempt(snapshot.open_current, root) if attempt(snapshot.read_current, root) is not None else None
    if opened is not None:
        opened[0].close()
    for ask in (snapshot_health, live_health, lease_health):
        attempt(ask, root)
    writer = SpoolWriter(root, "run", "good")
    writer.append(_ROWS[0])
    attempt(writer.flush)
    attempt(ingest, root, lock_timeout_s=0.1)
    shutil.rmtree(root / lease.FOLDER, ignore_errors=True)  # its supposed holder, for whom the rest would wait
    attempt(verify, root)
    attempt(gc, root)


_TIMEOUT_S = 2.0
_QUERIES = console.list_queries()
_STATEMENTS = (
    "select * from correction", "select module, avg(factor) from correction group by all order by 1",
    "describe correction", "select * from v_run_summary where run_id = $run_id", "from correction select step",
    "with recursive t(n) as (select 1 union all select n + 1 from t where n < 10) select * from t",
    "select {'a': [1, 2], 'b': map {'k': 1.5}}, '2001-01-01'::date, interval 1 day, 1::hugeint, 'x'::blob, true",
)  # fmt: skip
_WORDS = (
    "; drop table correction", "read_csv('/etc/passwd')", "copy correction to '/tmp/x'", "attach '/tmp/x'", "?", "--",
    "install httpfs", "pragma database_list", "set threads=99", "create table x(a int)", "delete from correction",
    "call pragma_version()", "select * from range(1000000000000)", "repeat('a', 10000000000)", "getenv('HOME')",
    "$1", "$nope", "/*", "select 1; select 2", "0::decimal(38,10)", "'9999-12-31'::date + 1", "union all", "nan",
    "make_timestamp(9223372036854775806)", "'infinity'::date", "1e999", "(select unnest(range(99999999)))", "⠀", "𝒳",
    "timestamptz '2001-01-01 00:00:00+99'", "(" * 2000, "select " + "1+" * 3000 + "1", "uuid()", "struct_pack(a := 1)",
)  # fmt: skip


def _run(folder: Path, sql: str, params: Any) -> None:
    """One statement, its rows in every form that the console writes."""
    form = ("table", "csv", "json", "parquet")[len(sql) % 4]
    with console.open_query(folder / "store", sql, params, timeout_s=_TIMEOUT_S) as result:
        if form == "parquet":
            result.write_parquet(folder / "out.parquet")
        else:
            print_rows(result.schema.names, result.rows(), form, folder / "out")


def _files(root: Path) -> list[tuple[str, int]]:
    return sorted((path.name, path.stat().st_size) for path in root.rglob("*") if path.is_file())


def _text(folder: Path, example: tuple[str, Any]) -> None:
    before = _files(folder / "store")
    attempt(_run, folder, *example)
    assert _files(folder / "store") == before, "the store changed"


def _values(folder: Path, example: tuple[int, dict[str, str]]) -> None:
    number, texts = example
    query = _QUERIES[number % len(_QUERIES)]
    given = dict(zip(query.parameter_names, texts.values(), strict=False)) | ({} if query.parameters else texts)
    values = attempt(query.values, given)
    if values is not None:
        attempt(_run, folder, query.sql, values or None)


def _file(folder: Path, example: str) -> None:
    (folder / "queries" / "mine.sql").write_bytes(example.encode("utf-8", "surrogatepass"))
    for query in attempt(console.list_queries, folder) or ():
        attempt(query.values, dict.fromkeys(query.parameter_names, "1"))
        json.dumps([query.name, query.purpose])


def _with_queries(folder: Path) -> Path:
    _copied(folder)
    (folder / "queries").mkdir()
    return folder


def _content(name: str) -> Strategy:
    data = (made(make_store) / name).read_bytes()
    is_json = name in _names(are_json=True)
    return st.tuples(
        st.just(name), hostile.broken_json(json.loads(data)) if is_json else hostile.broken_bytes(_head(data))
    )


_SPOOL = encode(_KEY, schema.to_table(Correction, list(_ROWS)))
_SPOOLS = hostile.broken_bytes(_SPOOL)
_TABLE = schema.to_table(Correction, list(_ROWS)).to_pydict()
_FOOTERS = hostile.broken(_METADATA, hostile.TEXTS).map(lambda m: {str(key): str(value) for key, value in m.items()})
_VERSIONS = st.sampled_from(("1", "2", "3", "0", "-1", "02", "99999999999"))
_METADATAS = st.one_of(st.just(_METADATA), _FOOTERS,
                       _VERSIONS.map(lambda version: {**_METADATA, "dflop.schema_version": version}))  # fmt: skip
_NAMES = st.sampled_from((
    "correction/run/a-000000.parquet", "correction/run/a.parquet", "x/y/z-000000.parquet",
    "correction/run/../a-000000.parquet", "correction/run/a-٣٣٣٣٣٣.parquet", "correction/r\nn/p-000000.parquet",
)) | hostile.TEXTS.map(lambda t: f"correction/run/{t.translate({0: '', 47: ''})[:60]}-000000.parquet")  # fmt: skip
_JSONS, _HEADS = (
    st.deferred(lambda are_json=are_json: st.one_of([_content(name) for name in _names(are_json=are_json)]))
    for are_json in (True, False)
)
_STATEMENT = hostile.broken_text(_STATEMENTS + tuple(query.sql for query in _QUERIES[::4]), _WORDS)
_PARAMS = st.dictionaries(st.sampled_from(("run_id", "nope", "")) | hostile.TEXTS, hostile.TEXTS, max_size=2)
_VALUES = st.dictionaries(st.sampled_from("abcd"), hostile.TEXTS | hostile.SCALARS.map(str), max_size=4)
_FILES = hostile.broken_text([query.sql for query in _QUERIES[:6]], ("-- parameters: $a bigint, x; ", "$a nope, y"))
TARGETS = (
    Target("spool-bytes", "bytes of spool files broken", _SPOOLS, _judge),
    Target("spool-tables", "spool files with other columns, types and footers",
           st.tuples(st.just(_TABLE) | hostile.broken(_TABLE), _METADATAS), _judge_table),
    Target("ingest", "names and bytes of spool files, several at once, through an ingest",
           st.lists(st.tuples(_NAMES, st.just(_SPOOL) | _SPOOLS), min_size=1, max_size=20), _ingest, quick=1,
           deadline_s=60),
    Target("store-json", "CURRENT, settings, leases, locks, reasons", _JSONS, _damaged, quick=1, deadline_s=60),
    Target("store-binary", "bytes of archives, logs of publishes, snapshots, the live database", _HEADS, _damaged,
           quick=2, deadline_s=60),
    Target("sql", "statements cut up, with what a console must refuse; parameters",
           st.tuples(_STATEMENT | st.sampled_from(_WORDS), st.none() | _PARAMS), _text, _with_queries, deadline_s=30),
    Target("sql-parameters", "values of the parameters of named queries", st.tuples(st.integers(0, 200), _VALUES),
           _values, _with_queries, deadline_s=30),
    Target("sql-file", "files of named queries", _FILES, _file, _with_queries),
)  # fmt: skip
