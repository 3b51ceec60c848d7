"""The command line as a person meets it: its own process, real exit codes, stdout and stderr."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from cyclopts import App

from dflop import cli
from tests.forked import run_module
from tests.jobs.configs import write_config
from tests.store.asking import fill
from tests.store.conftest import Make

HEAVY = ("torch", "prefect", "cvxpy", "duckdb", "polars", "pyarrow", "transformers", "matplotlib", "scipy", "numpy")


def python_path() -> str:
    """This checkout before what the tests were started with: another duckdb must be the same one in every process."""
    return os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])


def dflop(*args: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, forked: what it imports is imported already."""
    environment = {**os.environ, "PYTHONPATH": python_path(), "COLUMNS": "200", **env}
    return run_module("dflop.cli", *map(str, args), cwd=cwd, env=environment)


def subcommands(app: App, chain: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """Every command below an app, as the words that a person types; groups of commands come before what is in them."""
    found: list[tuple[str, ...]] = []
    for name in (name for name in app if not name.startswith("-")):
        found.append((*chain, name))
        found += subcommands(app[name], (*chain, name))
    return found


def command_of(app: App, words: Sequence[str]) -> App | None:
    """The command that a person means by these words; None: they are a group of commands."""
    for word in words:
        app = app[word]
    return app if app.default_command is not None else None


def assert_refused(done: subprocess.CompletedProcess[str], exit_code: int, *said: str) -> None:
    """One error of ours on stderr, nothing on stdout, no traceback."""
    assert done.returncode == exit_code, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("dflop: ") == 1
    assert "Traceback" not in done.stderr
    for words in said:
        assert words in done.stderr


def loaded_by(folder: Path, *args: str) -> tuple[list[str], str]:
    """(heavy modules that a command has imported when it ends, its stdout)."""
    code = (
        f"import sys; sys.argv = {['dflop', *args]!r}\n"
        "from dflop.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"print('heavy:', *sorted(set(sys.modules) & set({HEAVY!r})), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return done.stderr.rpartition("heavy:")[2].split(), done.stdout


def test_help_lists_the_commands_and_loads_nothing_heavy(tmp_path):
    heavy, shown = loaded_by(tmp_path, "--help")
    assert heavy == []
    for command in ("run", "train", "cancel", "report", "sql", "store"):
        assert f" {command} " in shown


def test_a_run_is_refused_before_training_or_flows_are_loaded(tmp_path):
    write_config(tmp_path)
    heavy, _ = loaded_by(tmp_path, "run", "run.yaml")
    assert set(heavy).isdisjoint({"torch", "transformers", "prefect", "cvxpy", "duckdb"})


def test_run_refuses_an_unknown_key_and_leaves_no_trace(tmp_path):
    write_config(tmp_path)
    text = (tmp_path / "run.yaml").read_text().replace('"store"', '"stroe"')
    (tmp_path / "run.yaml").write_text(text)
    before = sorted(tmp_path.rglob("*"))
    done = dflop("run", "run.yaml", cwd=tmp_path, PREFECT_HOME=str(tmp_path / "prefect"))
    assert_refused(done, 2, "unknown key `stroe`", "where: run.yaml:1: stroe", "did you mean `store`?")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return fill(tmp_path_factory.mktemp("cli") / "store", Make.run(), Make.run("done", 2000.0))


STATES = "select name, state, observed_at_s from run_record order by observed_at_s"


def test_sql_takes_parameters(store, tmp_path):
    query = "select count(*) as n from run_record where state = $state and run_id = $run"
    args = ("--param", "state=done", "--param", "run=run", "--format", "json")
    done = dflop("sql", query, "--store", store, *args, cwd=tmp_path)
    assert json.loads(done.stdout) == {"n": 1}


@pytest.mark.parametrize("statement", ["drop table run_record", "select 1; select 2", "select * from nothing_here"])
def test_sql_only_reads(store, tmp_path, statement):
    assert_refused(dflop("sql", statement, "--store", store, cwd=tmp_path), 4)


def test_sql_names_what_there_is(store, tmp_path):
    assert_refused(dflop("sql", "runns", "--store", store, cwd=tmp_path), 2, "did you mean `runs`?")
    assert_refused(dflop("sql", STATES, "--store", "nowhere", cwd=tmp_path), 4, "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_full_disk_is_no_traceback(monkeypatch, capsys):
    def write(*_args, **_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/config.resolved.yaml")

    monkeypatch.setattr(cli, "app", write)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 5
    said = capsys.readouterr().err
    assert said.startswith("dflop: disk error: No space left on device\n  where: /runs/config.resolved.yaml\n")
