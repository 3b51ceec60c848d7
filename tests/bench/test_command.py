"""The process that benchmarks want to be."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dflop.jobs.submit import CPU_ENV
from tests.bench.command import keep_to, options
from tests.bench.figures import ROOT

SCRIPT = """
import os, sys
from tests.bench.command import become_a_job, keep_to
keep_to(1)
become_a_job("job_like", OMP_NUM_THREADS="1")
print(os.environ["GLIBC_TUNABLES"], os.environ["OMP_NUM_THREADS"], len(os.sched_getaffinity(0)), *sys.argv[1:])
"""


def test_a_benchmark_starts_anew_as_jobs_are_started_with_its_arguments(tmp_path):
    (tmp_path / "job_like.py").write_text(SCRIPT)
    env = {k: v for k, v in os.environ.items() if k not in CPU_ENV} | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "job_like", "--part", "a b"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [CPU_ENV["GLIBC_TUNABLES"], "1", "1", "--part", "a", "b"]


def test_a_machine_with_too_few_cores_is_refused():
    with pytest.raises(SystemExit, match=r"needs 10000 cores, this process may use \d+"):
        keep_to(10_000)


def test_all_take_a_file_for_their_figures(tmp_path):
    assert options("what").parse_args([f"--json={tmp_path / 'a.json'}"]).json == tmp_path / "a.json"
    assert options("what").parse_args([]).json is None
