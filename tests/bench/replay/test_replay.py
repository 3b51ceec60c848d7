"""The script for GPU owners runs on a CPU with next to nothing installed, and what it writes can be replayed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from dflop.errors import DataError
from dflop.records import LLM
from tests.bench.replay.__main__ import LABEL, batches_of, main
from tests.bench.replay.times import Times
from tests.models.tiny_families import CASES

ABSENT = (
    "prefect", "duckdb", "cvxpy", "polars", "pydantic", "scipy", "numba", "PIL", "av", "ruamel", "rich", "cyclopts",
    "submitit", "matplotlib", "pytest", "hypothesis",
)  # fmt: skip
RUN = f"""
import runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        # Only for our own files: transformers takes what it finds installed.
        if name.partition(".")[0] in {ABSENT!r} and "site-packages" not in frame.f_code.co_filename:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
sys.argv = ["real_steps", "--out", sys.argv[1], "--device", "cpu", "--tiny", "--budget-s", "2", "--max-samples", "8"]
runpy.run_module("tests.gpu.real_steps", run_name="__main__")
"""


@pytest.fixture(scope="module")
def times(tmp_path_factory):
    folder = tmp_path_factory.mktemp("times")
    command = [sys.executable, "-c", RUN, str(folder)]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Times(folder / "tiny.parquet")


def test_times_become_costs_of_every_module_and_say_where_they_are_from(times):
    assert times.told["hardware"].startswith("cpu: ")
    assert times.told["software"].startswith("torch ")
    tables = times.cost(1).tables
    assert {(t.module, t.recompute) for t in tables} == {(m, r) for m in ("vision", LLM) for r in (False, True)}
    assert all(t.source == "measured" for t in tables if not t.recompute)
    stages = {module: (depth, ratio) for module, depth, ratio in times.stage_errors()}
    assert {module: depth for module, (depth, _) in stages.items()} == {"vision": 4, LLM: 4}
    assert all(ratio > 0 for _, ratio in stages.values())


def test_steps_are_composed_and_told_as_simulated(times, tmp_path, monkeypatch, capsys):
    figures = tmp_path / "figures.json"
    given = ["--times", str(times.path), "--gpus", "8", "--samples-per-gpu", "2", "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", ["replay", *given])
    main()
    told = capsys.readouterr().out
    assert told.startswith(f"{LABEL}: tiny on cpu: ")
    assert "they say nothing about any GPU" in told
    found = json.loads(figures.read_text())
    (outcome,) = found["outcomes"]
    assert found["label"] == LABEL
    assert outcome["num_gpus"] == 8
    assert 0 < outcome["ours_s"] <= outcome["layout_s"] * 1.001
    assert outcome["low"] <= outcome["speedup"] <= outcome["high"]


def test_batches_come_from_a_table_of_sizes(times, tmp_path):
    rows = {
        "id": ["a", "b"], "prompt_tokens": [10, 30], "response_tokens": [5, 7], "image_w": [[100], []],
        "image_h": [[60], []],
    }  # fmt: skip
    pl.DataFrame(rows).write_parquet(tmp_path / "sizes.parquet")
    batches = batches_of(times.family, tmp_path / "sizes.parquet", 6, 2)
    assert [len(batch) for batch in batches] == [6, 6]
    assert {s.num_text_tokens for batch in batches for s in batch} == {15, 37}
    assert all(bool(s.items) == (s.num_text_tokens == 15) for batch in batches for s in batch)
    assert [s.sample_index for s in batches[0]] == list(range(6))


def test_a_model_without_eyes_needs_a_table():
    with pytest.raises(DataError, match="`qwen2_audio` takes none"):
        batches_of(CASES["Qwen2-Audio"].family, None, 6, 1)
