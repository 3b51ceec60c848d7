from __future__ import annotations

import json
import subprocess

import pytest

from tests.bench import figures
from tests.bench.figures import Figure, conclude, finish, json_text, machine, revision, slug


@pytest.mark.parametrize(
    ("cpu", "name"),
    [
        ("AMD EPYC", "2-core-amd-epyc"),
        ("Intel(R) Xeon(R) Processor", "2-core-intel-xeon"),
        ("cpu: Intel(R) Xeon(R) CPU @ 2.20GHz", "2-core-intel-xeon"),
        ("AMD EPYC 7763 64-Core Processor", "2-core-amd-epyc-7763"),
    ],
)
def test_a_machine_has_a_name_for_folders(cpu, name):
    assert slug({"cpu": cpu, "num_cores": 2}) == name


def test_figures_say_where_and_with_what_they_were_measured(tmp_path, monkeypatch):
    for words in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "a"],
    ):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    commit, is_dirty = revision()
    assert (len(commit), is_dirty) == (40, False)
    (tmp_path / "tests/bench/results").mkdir(parents=True)
    (tmp_path / "tests/bench/results/a.json").write_text("{}")
    assert revision() == (commit, False)  # results of other parts are no change of what is measured
    (tmp_path / "a.py").write_text("")
    assert revision() == (commit, True)
    assert {"cpu", "num_cores", "python", "numpy", "dflop", "date"} < machine("numpy").keys()


def test_outside_a_checkout_the_commit_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert revision() == (None, None)


def test_missed_bounds_are_written_and_end_the_process(tmp_path):
    met, missed = Figure("a", 1.0, 2.0, "", None), Figure(" b ", 1.0, None, "other", 1.5, 2.0)
    told = Figure("c", 9.0, None, "", None)
    with pytest.raises(SystemExit, match="bound missed: b"):
        finish([met, missed, told], tmp_path / "new" / "a.json")
    content = json.loads((tmp_path / "new" / "a.json").read_text())
    assert (content["num_bounds"], content["missed"]) == (2, ["b"])
    assert [f["name"] for f in content["figures"]] == ["a", " b ", "c"]
    conclude({}, [("a", True)], None)


def test_a_file_of_figures_has_a_line_per_row_and_reads_back():
    rows = [{"peer": f"peer {i}", "ratio": [1.5, -2, 3e-05] * 10, "note": "[1,\n 2] {"} for i in range(4)]
    content = {"machine": {"cpu": "A"}, "rows": rows, "none": [], "long": [0.25] * 300}
    text = json_text(content)
    assert json.loads(text) == content
    lines = text.splitlines()
    assert lines[1] == ' "machine": {"cpu": "A"},'
    assert sum('"peer": ' in line for line in lines) == 4
    assert text.endswith("}\n")
