import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop import files
from dflop.errors import StoreError
from dflop.records import Correction, SampleShape
from dflop.store import schema, spool
from dflop.store.spool import SpoolKey, SpoolWriter
from tests.store.spooled import read_spool

NAMES = st.from_regex(spool._NAME, fullmatch=True)


@given(NAMES, st.lists(NAMES, min_size=1, max_size=3), NAMES, st.integers(0, 10**9))
def test_a_path_names_exactly_one_key(kind: str, run: list[str], producer: str, seq: int) -> None:
    key = SpoolKey(kind, "/".join(run), producer, seq)
    assert SpoolKey.parse(key.relative_path) == key
    for path in (
        "correction/p-000000.parquet", "correction/run/p-1.parquet", "correction/run/p.parquet", "x-000000.parquet",
    ):  # fmt: skip
        assert SpoolKey.parse(path) is None, "the writer cannot have written it"


def test_flush_acknowledges_rows_that_are_on_disk(tmp_path: Path, make) -> None:
    writer = SpoolWriter(tmp_path, "run/compare", "p", flush_rows=2)
    rows = [make.correction(i) for i in range(3)]
    for row in rows:
        writer.append(row)
    assert writer.num_acknowledged == 2  # the full buffer went out by itself
    assert read_spool(tmp_path, Correction) == rows[:2]
    writer.append(make.shape(1))
    writer.flush()
    assert writer.num_acknowledged == 4
    assert read_spool(tmp_path, Correction) == rows
    assert read_spool(tmp_path, SampleShape) == [make.shape(1)]


def test_old_rows_do_not_wait_for_a_full_buffer(tmp_path: Path, make, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(spool.time, "monotonic", lambda: now_s)
    writer = SpoolWriter(tmp_path, "run", "p")
    writer.append(make.correction())
    assert writer.num_acknowledged == 0
    now_s += spool.FLUSH_AFTER_S + 1
    writer.append(make.correction())
    assert writer.num_acknowledged == 2


def test_numbers_continue_after_a_restart_and_after_a_quarantined_file(tmp_path: Path, make) -> None:
    for step in (0, 1):
        with SpoolWriter(tmp_path, "run", "p") as writer:
            writer.append(make.correction(step))
    moved = tmp_path / "quarantine/correction/run/p-000001.parquet.abc"
    moved.parent.mkdir(parents=True)
    (tmp_path / "spool/correction/run/p-000001.parquet").rename(moved)
    with SpoolWriter(tmp_path, "run", "p") as writer:
        writer.append(make.correction(2))
    names = sorted(path.name for _, path in spool.list_files(tmp_path))
    assert names == ["p-000000.parquet", "p-000002.parquet"]


def test_two_writers_with_one_name_overwrite_nothing(tmp_path: Path, make, monkeypatch: pytest.MonkeyPatch) -> None:
    next_seq = spool.next_seq
    stale = iter([0])  # what the second writer saw before the first one wrote
    with SpoolWriter(tmp_path, "run", "p") as first:
        first.append(make.correction(0))
    monkeypatch.setattr(spool, "next_seq", lambda *args: next(stale, next_seq(*args)))
    with SpoolWriter(tmp_path, "run", "p") as second:
        second.append(make.correction(1))
    assert read_spool(tmp_path, Correction) == [make.correction(0), make.correction(1)]


@pytest.mark.parametrize("left", ["in the quarantine", "compacted"])
def test_a_number_that_somebody_else_used_under_our_name_is_not_used_again(tmp_path: Path, make, left: str) -> None:
    writer = SpoolWriter(tmp_path, "run", "p", flush_rows=1)
    writer.append(make.correction(0))
    SpoolWriter(tmp_path, "run", "p", flush_rows=1).append(make.correction(1))
    theirs = tmp_path / "spool" / SpoolKey("correction", "run", "p", 1).relative_path
    folder = tmp_path / ("archive" if left == "compacted" else "quarantine") / "correction" / "run"
    folder.mkdir(parents=True)
    if left == "compacted":
        (folder / spool.NEXT_SEQ_FILE).write_text('{"p": 2}')
        theirs.unlink()
    else:
        theirs.rename(folder / f"{theirs.name}.0123456789ab")
    writer.append(make.correction(2))
    assert [name[-9:] for name, _ in spool.list_files(tmp_path)] == ["0.parquet", "2.parquet"]


@pytest.mark.parametrize(
    ("code", "what"), [(errno.ENOSPC, "disk is full"), (errno.EDQUOT, "quota"), (errno.EIO, "Input/output error")]
)
def test_a_failing_disk_leaves_no_half_file_and_loses_no_row(
    tmp_path: Path, make, monkeypatch: pytest.MonkeyPatch, code: int, what: str
) -> None:
    def fail(_fd: int) -> None:
        raise OSError(code, os.strerror(code))

    writer = SpoolWriter(tmp_path, "run", "p")
    writer.append(make.correction())
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        with pytest.raises(StoreError, match=what):
            writer.flush()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert writer.num_acknowledged == 0
    writer.flush()
    assert read_spool(tmp_path, Correction) == [make.correction()]
    assert writer.num_acknowledged == 1


@pytest.mark.parametrize(
    ("run_id", "producer"), [("../x", "p"), ("a//b", "p"), ("", "p"), ("run", "p/q"), ("run", ".p")]
)
def test_names_that_are_no_file_names_are_refused(tmp_path: Path, run_id: str, producer: str) -> None:
    with pytest.raises(StoreError, match="cannot be part of a file name"):
        SpoolWriter(tmp_path, run_id, producer)


def test_a_file_whose_name_cannot_be_made_durable_is_taken_back(tmp_path: Path, make, monkeypatch) -> None:
    def fail(folder: Path) -> None:
        if folder.name == "run":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer = SpoolWriter(tmp_path, "run", "p")
    writer.append(make.correction())
    with monkeypatch.context() as broken:
        broken.setattr(files, "fsync", fail)
        with pytest.raises(StoreError):
            writer.flush()
    writer.flush()
    assert read_spool(tmp_path, Correction) == [make.correction()]  # once


def test_bytes_are_on_disk_before_the_file_has_its_name(tmp_path: Path, make, monkeypatch) -> None:
    calls: list[str] = []
    fsync, link = os.fsync, os.link

    def note_fsync(fd: int) -> None:
        fsync(fd)
        calls.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else f"{os.fstat(fd).st_size} bytes")

    def note_link(source: Path, target: Path) -> None:
        link(source, target)
        calls.append("link")

    writer = SpoolWriter(tmp_path, "run", "p")
    writer.append(make.correction())
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "link", note_link)
    writer.flush()
    (file,) = (path for path in tmp_path.rglob("*.parquet"))
    assert calls[-3:] == [f"{file.stat().st_size} bytes", "link", "folder"]


def test_a_link_that_nfs_reports_twice_is_ours(tmp_path: Path, make, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def answer_lost(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)  # the repeated request meets the first one's result

    monkeypatch.setattr(os, "link", answer_lost)
    with SpoolWriter(tmp_path, "run", "p") as writer:
        writer.append(make.correction())
    assert read_spool(tmp_path, Correction) == [make.correction()]


def test_rows_are_kept_when_the_block_fails(tmp_path: Path, make) -> None:
    writer = SpoolWriter(tmp_path, "run", "p")
    writer.append(make.correction())
    with pytest.raises(TypeError, match="object has no table"), writer:
        writer.append(object())
    assert read_spool(tmp_path, Correction) == [make.correction()]


def test_compute_nodes_need_neither_duckdb_nor_polars() -> None:
    code = "import sys, dflop.store.spool; print(sorted({'duckdb', 'polars'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_table_goes_in_as_the_records_would(tmp_path: Path, make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "TABLE_ROWS", 2)
    records = [make.correction(step) for step in range(5)]
    table = schema.to_table(Correction, records)
    # Another order of columns, wider types, one column too many: what another library makes of the same rows.
    given = table.select(table.column_names[::-1]).append_column("more", [["x"] * 5])
    given = given.set_column(given.column_names.index("module"), "module", given["module"].cast(pa.large_string()))
    with SpoolWriter(tmp_path, "run", "p") as writer:
        writer.append_table(Correction, given)
        assert writer.num_acknowledged == 5
        assert len(list(spool.list_files(tmp_path))) == 3, "a long table is several files"
        writer.append(make.correction(5))
    assert read_spool(tmp_path, Correction) == [*records, make.correction(5)]


@pytest.mark.parametrize("spoil", [lambda t: t.drop_columns(["factor"]), lambda t: t.set_column(4, "factor", [["x"]])])
def test_a_table_that_does_not_fit_is_refused(tmp_path: Path, make, spoil) -> None:
    writer = SpoolWriter(tmp_path, "run", "p")
    with pytest.raises(StoreError, match="cannot write the spool"):
        writer.append_table(Correction, spoil(schema.to_table(Correction, [make.correction()])))
    assert read_spool(tmp_path, Correction) == []
