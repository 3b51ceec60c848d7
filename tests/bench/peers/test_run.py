"""A whole run on a small problem: every peer has a row, a second run goes on behind the first."""

from __future__ import annotations

import json

import pytest

from tests.bench.peers import __main__ as command
from tests.bench.peers import cases, packages
from tests.bench.peers.contest import Settings
from tests.bench.peers.page import tables
from tests.bench.schedule import rivals


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(cases, "GLOBAL_BATCH_SIZE", 32)
    monkeypatch.setattr(cases, "NUM_PLANNING", 1)
    monkeypatch.setattr(cases, "COUNTS", (1, 2))
    monkeypatch.setattr(command, "QUICK", Settings(num_batches=2, cp_sat_limit_s=0.1, num_cp_sat=1))
    monkeypatch.setattr(packages, "FLATFLOW", packages.CLIENTS / "nowhere")
    monkeypatch.setattr(packages, "GALVATRON", packages.CLIENTS / "nowhere")
    monkeypatch.setattr(rivals, "ORTOOLS", packages.CLIENTS / "nowhere")


def test_a_run_that_was_stopped_goes_on(small, monkeypatch, tmp_path, capsys):
    path = tmp_path / "peers.json"

    def run(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["peers", "--json", str(path), *words])
        command.main()
        return capsys.readouterr().err

    run("--cells", "VL 7B; generated, main")
    content = json.loads(path.read_text())
    (cell,) = content["cells"]
    ran = {row["peer"] for row in cell["rows"] if row["ratio"]}
    assert {"random", "batch rebalance", "LPT on tokens", "planner: uniform", "planner: reference"} <= ran
    assert {row["on"] for row in cell["rows"] if row["kind"] == "batch"} == {"dflop", "uniform"}
    absent = {row["peer"]: row["note"] for row in cell["rows"] if not row["ratio"]}
    assert absent["CP-SAT, reference's program"].startswith("not installed")
    assert absent["FlatFlow, stable"].startswith("not installed")
    assert all(r > 0.2 for row in cell["rows"] for r in row["ratio"])
    assert set(tables(content)) == {"peers", "peers-all"}

    monkeypatch.setattr(command, "run_cell", lambda *_: pytest.fail("done already"))
    assert "goes on behind 1 cells" in run("--cells", "VL 7B; generated, main")
    assert json.loads(path.read_text())["num_parts"] == 2


def test_bad_words_end_with_a_sentence(monkeypatch, capsys, tmp_path):
    for words, said in ((["--sizes", str(tmp_path / "no")], "no table of sizes"), (["--cells", "x"], "no cell")):
        monkeypatch.setattr("sys.argv", ["peers", *words])
        with pytest.raises(SystemExit) as stop:
            command.main()
        assert stop.value.code == 2
        assert said in capsys.readouterr().err
