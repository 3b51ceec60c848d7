"""The functions for notebooks answer what the commands do, and the example of each one's docstring runs."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import subprocess
import sys

import pytest

from dflop import api, units
from dflop.data.demo import make_demo_dataset
from dflop.errors import ConfigError
from tests.jobs.configs import write_demo_config
from tests.test_cli import dflop

SMALL = ("cluster.num_processes_per_node=2", "plan.global_batch_size=4", "plan.num_scenarios=2", "plan.top=4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a configuration, `my.yaml`."""
    folder = tmp_path_factory.mktemp("api")
    write_demo_config(folder, 12, *SMALL).rename(folder / "my.yaml")
    make_demo_dataset(folder / "demo", 12)
    return folder


def example(name):
    """Of a function's docstring."""
    doc = ast.get_docstring(next(n for n in ast.walk(TREE) if isinstance(n, ast.FunctionDef) and n.name == name))
    (found,) = re.findall(r"^Example: `(.+)`$", doc, re.MULTILINE)
    return found


with open(api.__file__, encoding="utf-8") as file:
    TREE = ast.parse(file.read())


@pytest.mark.lane("people")
def test_a_plan_is_that_of_the_command(folder, monkeypatch):
    monkeypatch.chdir(folder)
    seconds = eval(example("plan"), {"api": api})
    done = dflop("plan", "my.yaml", "--device", "h100", "--gpus", "64", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["step simulated"] == units.seconds(seconds)


def test_a_plan_says_what_it_is_made_from_also_where_an_event_loop_runs(folder, monkeypatch):
    monkeypatch.chdir(folder)
    heard = []

    async def in_a_notebook():
        return api.plan("my.yaml", device="h100", gpus=4, batch=8, overrides={"plan.top": 2}, say=heard.append)

    found = asyncio.run(in_a_notebook())
    assert found.plans[0] is found.best
    assert found.config.plan.global_batch_size == 8
    assert found.config.plan.top == 2
    assert found.speed.tokens_per_s_per_gpu > 0
    assert heard
    with pytest.raises(ConfigError, match="no data sheet of device `b300`"):
        api.plan("my.yaml", device="b300")


def test_a_comparison_has_rows_and_a_verdict(folder, monkeypatch):
    monkeypatch.chdir(folder)
    found = api.compare("my.yaml", device="h100", gpus=4, num_batches=2)
    assert found.verdict
    assert len(found.rows) > 2
    assert all(set(row) == set(found.rows[0]) for row in found.rows)


def test_an_estimate_is_of_numbers_or_of_a_file(tmp_path):
    assert 0 <= eval(example("estimate"), {"api": api}) < 1
    lengths = [120, 80, 4000, 300] * 64
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, lengths)))
    assert api.estimate(lengths, ranks=4) == api.estimate(tmp_path / "lengths.txt", ranks=4)


@pytest.mark.lane("jobs")
def test_a_profile_has_the_cost_tables_of_its_modules(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert eval(example("profile"), {"api": api}) in ("vision", "audio", "llm")


def test_importing_it_imports_nothing_heavy():
    heavy = "torch", "polars", "duckdb", "pydantic", "cvxpy", "numpy"
    script = f"import sys, dflop.api; print([m for m in {heavy!r} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"
