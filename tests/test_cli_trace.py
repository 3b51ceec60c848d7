"""`dflop trace` and `dflop report` as a person meets them: their own process, data on stdout, talk on stderr."""

import json
from pathlib import Path

import pytest

from dflop.run.directory import RunDir
from tests.jobs.finished import finished_run
from tests.report.chrome_trace import problems_of
from tests.test_cli import assert_refused, dflop


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return finished_run(tmp_path_factory.mktemp("cli"), num_steps=4)


def test_the_path_is_data_and_the_rest_is_talk(run: RunDir, tmp_path: Path) -> None:
    out = tmp_path / "two.json"
    done = dflop("trace", run.path, "--steps", "1:3", "--out", out, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    assert "steps 1 to 2: 2 measured, 2 also predicted;" in done.stderr
    assert problems_of(json.loads(out.read_text())) == []


def test_mistakes_are_told(run: RunDir, tmp_path: Path) -> None:
    assert_refused(dflop("trace", tmp_path, cwd=tmp_path), 2, "config.resolved.yaml is missing")
    assert_refused(dflop("trace", run.path, "--out", "no/t.json", cwd=tmp_path), 2, "no folder `no`")
    assert_refused(dflop("trace", run.path, "--out", "t.png", cwd=tmp_path), 2, "valid endings: .json, .json.gz")


def test_the_report_is_written_again(run: RunDir, tmp_path: Path) -> None:
    done = dflop("report", run.path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(run.report_file)
    assert run.report_file.read_text().startswith("<!doctype html>")
