from __future__ import annotations

from pathlib import Path

import pytest

from dflop.errors import ConfigError
from dflop.jobs.find import all_runs, find_run, training_runs
from tests.jobs.made import begun_at, make_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs to train and one for a plan, begun in this order; and a folder that is no run."""
    for at, name in enumerate(("demo-20260101-000000", "demo-20260102-000000", "big-20260103-000000")):
        begun_at(make_run(tmp_path, name), 1000.0 + at)
    begun_at(make_run(tmp_path, "demo-plan-20260104-000000", trains=False), 2000.0)
    (tmp_path / "runs" / "demo-notes").mkdir()
    return tmp_path / "runs"


def test_runs_come_newest_first(runs):
    names = ["demo-plan-20260104-000000", "big-20260103-000000", "demo-20260102-000000", "demo-20260101-000000"]
    assert [run.run_id for run in all_runs(runs)] == names
    assert [run.run_id for run in training_runs(runs)] == names[1:]
    assert all_runs(runs / "nowhere") == []


@pytest.mark.parametrize(
    ("name", "run_id"),
    [
        ("latest", "big-20260103-000000"),
        ("big", "big-20260103-000000"),
        ("demo-20260101", "demo-20260101-000000"),
        ("demo-20260102-000000", "demo-20260102-000000"),
        ("demo-plan", "demo-plan-20260104-000000"),
    ],
)
def test_a_run_is_meant_by_its_id_or_the_beginning_of_it(runs, name, run_id):
    assert find_run(name, runs).path == runs / run_id


def test_a_directory_goes_before_names(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_run("runs/big-20260103-000000", Path("elsewhere")).path == runs / "big-20260103-000000"
    assert find_run(str(runs / "big-20260103-000000"), Path("elsewhere")).run_id == "big-20260103-000000"


def test_a_beginning_of_several_lists_them(runs):
    with pytest.raises(ConfigError, match="3 runs begin with `demo`") as caught:
        find_run("demo", runs)
    assert "demo-20260101-000000" in caught.value.hint


def test_an_id_that_is_also_a_beginning_is_the_run(tmp_path):
    make_run(tmp_path, "a-1")
    make_run(tmp_path, "a-1-2")
    assert find_run("a-1", tmp_path / "runs").run_id == "a-1"


def test_no_run_lists_what_there_is(runs, tmp_path):
    with pytest.raises(ConfigError, match="no run `bug-2026") as caught:
        find_run("bug-20260103-000000", runs)
    assert "did you mean `big-20260103-000000`?" in caught.value.hint
    with pytest.raises(ConfigError, match="there is no run yet"):
        find_run("latest", tmp_path / "empty")
