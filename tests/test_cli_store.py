"""`dflop store` and `dflop sql` as an operator uses them: real processes, exit codes, what is on stdout and stderr."""

import dataclasses
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dflop.store.ingest import ingest
from dflop.store.snapshot import read_current
from dflop.store.spool import list_files
from tests.forked import Program, run_module
from tests.launch.helpers import until
from tests.store import asking
from tests.store.conftest import Make
from tests.test_cli import assert_refused, dflop, python_path


def write(root: Path, *names: str) -> None:
    for i, name in enumerate(names):
        asking.write(root, dataclasses.replace(Make.run("done", 1000.0 + i), name=name))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    write(root, "a", "b", "c")
    ingest(root)
    return root


def run(store: Path, *args: object) -> tuple[int, str, str]:
    done = dflop("store", *args, cwd=store.parent, DFLOP_STORE=str(store))
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout.strip(), done.stderr


def test_a_store_is_set_up_and_kept(tmp_path: Path) -> None:
    root = tmp_path / "team"
    code, out, _ = run(root, "init", "--keep-snapshots", 2, "--grace-s", 0)
    assert (code, "keep_snapshots=2" in out) == (0, True)
    assert run(root, "migrate")[:2] == (0, "up to date")
    for name in "abcd":
        write(root, name)
        run(root, "ingest")
    assert run(root, "verify")[:2] == (0, "ok")
    assert len(list((root / "snapshots").iterdir())) == 2
    code, out, _ = run(root, "status")
    assert "snapshot 4" in out
    assert re.search(r"^2 snapshots take [\d.]+ MiB \(limit [\d.]+ MiB\)$", out, re.M)
    assert [*json.loads(run(root, "status", "--json")[1])["snapshots"]] == [f"dflop-{n:06d}.duckdb" for n in (3, 4)]
    assert "0 spool files not ingested" in out
    assert "run_record" in out


def test_verify_fails_with_exit_code_1_and_names_the_file(store: Path) -> None:
    next((store / "spool/run_record/run").iterdir()).unlink()
    code, out, err = run(store, "verify")
    assert code == 1
    assert "is in the database, but neither in the spool nor in the archive" in out
    assert "dflop store rebuild" in err


def test_a_lost_database_is_rebuilt_and_an_old_snapshot_made_again(store: Path) -> None:
    write(store, "later")
    ingest(store)
    shutil.rmtree(store / "live")
    assert run(store, "rebuild")[:2] == (0, "snapshot 3: 4 rows of 4 files")
    code, out, _ = run(store, "rebuild", "--snapshot", 1, "--output", "one.duckdb")
    assert (code, out) == (0, "one.duckdb: snapshot 1, 3 rows of 3 files")
    assert_refused(
        dflop("store", "rebuild", "--snapshot", 1, "--store", store, cwd=store.parent), 2, "--output go together"
    )


def test_compact_and_gc_say_what_they_would_do_before_they_do_it(store: Path) -> None:
    would = run(store, "compact", "--min-files", 2, "--min-age-h", 0, "--dry-run")[1]
    assert would == "3 files of 1 runs would become 1"
    assert len(list(list_files(store))) == 3
    said = run(store, "compact", "--min-files", 2, "--min-age-h", 0)[1]
    assert re.fullmatch(r"3 files of 1 runs became 1, [\d.]+ KiB became [\d.]+ KiB", said)
    assert list(list_files(store)) == []
    assert run(store, "verify")[1] == "ok"
    old = store / "spool/run_record/run/.tmp-host-1-x"
    old.write_bytes(b"half")
    os.utime(old, (1.0, 1.0))
    assert run(store, "gc", "--dry-run")[1].startswith("1 files, ")
    assert old.exists()
    _, out, err = run(store, "gc")
    assert out.startswith("1 files, ")
    assert "2 snapshots take " in err
    assert not old.exists()


def test_watch_ingests_what_arrives_and_ends_in_peace(store: Path) -> None:
    out, err = store.parent / "out", store.parent / "err"
    arguments = ("store", "ingest", "--watch", "--interval-s", "0.2", "--store", str(store))
    watching = Program("dflop.cli", arguments, os.environ, out, err=err)
    try:
        write(store, "new")
        until(lambda: read_current(store).seq == 2, what="the new file")
        os.kill(watching.pid, signal.SIGTERM)
        assert watching.wait(60) == 0, err.read_text()
    finally:
        watching.kill()
    assert out.read_text().endswith("passes\n")
    assert "snapshot 2: 1 rows of 1 files" in err.read_text()


def test_sql_writes_files_of_every_form(store: Path) -> None:
    query = "select name, [1, 2] as pair, 'nan'::double as x from run_record order by name"
    for form in ("csv", "json", "parquet", "table"):
        done = dflop("sql", query, "--format", form, "--output", f"rows.{form}", "--store", store, cwd=store.parent)
        assert (done.returncode, done.stdout) == (0, "")
        assert done.stderr == f"3 rows of snapshot 1 written to rows.{form}\n"
    assert (store.parent / "rows.csv").read_text().splitlines()[:2] == ["name,pair,x", 'a,"[1, 2]",nan']
    assert json.loads((store.parent / "rows.json").read_text().splitlines()[0]) == {
        "name": "a",
        "pair": [1, 2],
        "x": None,
    }
    assert pq.read_table(store.parent / "rows.parquet")["name"].to_pylist() == ["a", "b", "c"]
    assert "3 rows" in (store.parent / "rows.table").read_text()


def test_sql_is_read_as_people_have_it(store: Path) -> None:
    query = "-- how long\nselect 7 as a"
    (store.parent / "query.sql").write_text(query)
    given = [(query,), ("--query", query), (f"--query={query}",), ("--how long\nselect 7 as a",), ("query.sql",)]
    for words in given:
        done = dflop("sql", *words, "--json", "--store", store, cwd=store.parent)
        assert (done.returncode, done.stdout) == (0, '{"a": 7}\n'), (words, done.stderr)
    for words in (("-",), ()):
        command = [sys.executable, "-m", "dflop.cli", "sql", *words, "--json", "--store", str(store)]
        env = {**os.environ, "PYTHONPATH": python_path()}
        assert subprocess.run(command, input=query.encode(), env=env, stdout=subprocess.PIPE).stdout == b'{"a": 7}\n'
    missing = dflop("sql", "none.sql", "--store", store, cwd=store.parent)
    assert_refused(missing, 2, "cannot read the query: No such file or directory", "where: none.sql")
    assert_refused(dflop("sql", "--lst", "--store", store, cwd=store.parent), 2, "--list")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("sql",), "no query"),
        (("sql", "slowest_steps"), "needs parameter `run_id`"),
        (("sql", "runs", "--format", "parquet"), "Parquet needs a file"),
    ],
)
def test_a_wrong_question_is_a_usage_error(store: Path, args: tuple[str, ...], words: str) -> None:
    assert_refused(dflop(*args, "--store", store, cwd=store.parent), 2, words)


def test_a_reader_that_has_seen_enough_is_no_error(store: Path) -> None:
    command = ["-m", "dflop.cli", "sql", "from range(1000000)", "--format", "csv", "--store", str(store)]
    env = {**os.environ, "PYTHONPATH": python_path()}
    with subprocess.Popen(
        [sys.executable, *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"range\r\n"
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (0, b"")


def test_an_output_that_cannot_be_written_is_named(store: Path) -> None:
    done = dflop("sql", "select 1", "--format", "csv", "--output", "none/x", "--store", store, cwd=store.parent)
    assert_refused(done, 2, "cannot write the result: No such file or directory", "where: none/x")


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_pipe_is_written_into_and_not_replaced(store: Path, form: str) -> None:
    fifo = store.parent / "fifo"
    os.mkfifo(fifo)
    with subprocess.Popen(["cat", str(fifo)], stdout=subprocess.PIPE) as cat:
        try:
            done = dflop("sql", "select 7 as a", "--format", form, "--output", fifo, "--store", store, cwd=store.parent)
            assert done.returncode == 0, done.stderr
            assert stat.S_ISFIFO(fifo.stat().st_mode)
            data = cat.communicate(timeout=60)[0]
        finally:
            cat.kill()
    assert data.startswith({"csv": b"a\r\n7", "parquet": b"PAR1"}[form])


def test_json_is_json_whatever_the_values_are(store: Path) -> None:
    query = "select {'x': 'nan'::double} as a, '\\xAB'::blob as b, 'inf'::double as c, [1, null] as d"
    done = dflop("sql", query, "--format", "json", "--store", store, cwd=store.parent)
    assert json.loads(done.stdout, parse_constant=lambda _: "not JSON") == {
        "a": {"x": None},
        "b": "ab",
        "c": None,
        "d": [1, None],
    }
    twice = dflop("sql", "select 1 as a, 2 as a", "--format", "json", "--store", store, cwd=store.parent)
    assert_refused(twice, 2, "duplicate column names: a")


def test_one_function_cannot_take_the_machines_memory(store: Path) -> None:
    done = dflop("sql", "select length(range(1000000000))", "--store", store, cwd=store.parent)
    assert_refused(done, 4, "Out of Memory", "a query may use 4GiB")


def test_a_function_that_hears_no_interrupt_is_stopped(store: Path) -> None:
    query = "select levenshtein(repeat('a', 1000000), repeat('b', 1000000 + a::int)) from range(1) as r(a)"
    code = "from dflop.store import console; console.OVERTIME_S = 2.0; from dflop.cli import main; main()"
    arguments = ("sql", query, "--timeout-s", "0.5", "--store", str(store))
    done = run_module("tests.store.snippet", code, *arguments, cwd=store.parent, env=os.environ)
    assert_refused(done, 4, "stopped after 0.5 s", "did not end by itself")
