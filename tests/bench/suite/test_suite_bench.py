"""The suite's figures come out as those of the other benchmarks do: machine first, bounds named."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from tests.bench.suite import __main__ as bench


def case(ours_s: float) -> dict:
    return {
        "model": "A", "data": "main", "step_s": {"uniform tuned": [2.0, 2.0], "dflop": [ours_s, ours_s]},
        "num_over_cap": {"uniform tuned": 0, "dflop": 0},
    }  # fmt: skip


@pytest.mark.parametrize(("ours_s", "missed"), [(1.0, []), (4.0, ["A, main: 0.50x of the best uniform plan"])])
def test_a_suite_that_is_slower_misses_a_bound(tmp_path, monkeypatch, capsys, ours_s, missed):
    def run_suite(name, say, pictures, json_file):
        assert (name, pictures) == ("paper", [])
        told = {"suite": name, "machine": {"cpu": "cpu: X"}, "versions": {}, "date": "", "cases": [case(ours_s)]}
        json_file.write_text(json.dumps(told))
        return SimpleNamespace(columns=("a",), rows=[("x",)])

    monkeypatch.setattr(bench, "run_suite", run_suite)
    monkeypatch.setattr(sys, "argv", ["suite", f"--json={tmp_path / 'suite.json'}"])
    if missed:
        with pytest.raises(SystemExit, match="bound missed"):
            bench.main()
    else:
        bench.main()
    content = json.loads((tmp_path / "suite.json").read_text())
    assert list(content)[:3] == ["machine", "num_bounds", "missed"]
    assert (content["num_bounds"], content["missed"]) == (2, missed)
    assert "numba" in content["machine"]
    assert not {"versions", "date"} & content.keys()
    assert "x" in capsys.readouterr().out
