"""slurm/train.sbatch as a shell runs it, with commands that only say what they were asked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflop.run import lifecycle
from dflop.run.directory import RunDir
from dflop.run.driver_lock import drive_alone
from tests.builders import make_plan
from tests.jobs.made import make_run
from tests.launch.helpers import REPO


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path)
    run.write_plan(make_plan({"llm": 2}), [])
    return run


def train(folder: Path, *args: str, num_tasks: int = 0) -> tuple[int, str, str]:
    """(exit code, arguments of srun, what was said) of the batch script, submitted from a folder with a `.venv`."""
    (folder / ".venv/bin").mkdir(parents=True, exist_ok=True)
    (folder / ".venv/bin/activate").write_text(f"PATH={folder}/bin:$PATH\n")
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in (("srun", 'echo "$@"'), ("scontrol", "echo n1"), ("python", f'exec {sys.executable} "$@"')):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1", "SLURM_NTASKS": str(num_tasks)}
    done = subprocess.run(
        ["bash", REPO / "slurm/train.sbatch", *args], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, **slurm, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_ranks_of_the_run_that_is_meant_are_started(run, tmp_path):
    num_tasks = run.plan().num_processes
    code, srun, said = train(tmp_path, "latest", "compare", num_tasks=num_tasks)
    assert (code, said) == (0, "")
    assert srun.startswith(f"--ntasks={num_tasks} ")
    assert srun.endswith(f"dflop.jobs.train {run.path} compare\n")


def test_what_is_configured_wrongly_ends_with_2_and_what_to_give(run, tmp_path):
    needed = run.plan().num_processes
    for args, num_tasks, said in (
        ((), needed, "usage: sbatch slurm/train.sbatch RUN [train|compare]"),
        (("'+__import__('os').abort()+'",), needed, "no run directory `'+__import__"),
        (("latest",), needed + 1, f"the job has {needed + 1} tasks, the plan needs {needed}"),
    ):  # fmt: skip
        code, srun, told = train(tmp_path, *args, num_tasks=num_tasks)
        assert (code, srun) == (2, "")
        assert said in told
    assert f"--ntasks={needed} slurm/train.sbatch latest" in told


def test_a_finished_run_is_told_of_and_a_driven_one_refused(run, tmp_path):
    needed = run.plan().num_processes
    with drive_alone(run, print):
        code, _, said = train(tmp_path, "latest", num_tasks=needed)
    assert (code, "already has a driver" in said) == (5, True)
    lifecycle.note(run, lifecycle.DONE)
    code, srun, said = train(tmp_path, run.run_id, num_tasks=needed)
    assert (code, srun) == (0, "")
    assert "is finished, nothing to do" in said
