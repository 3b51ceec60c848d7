"""What a task of a Slurm job does, started as srun would start it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from submitit.core.utils import DelayedSubmission

from dflop.launch.payload import Payload
from dflop.launch.submitted import handle_of
from dflop.launch.tail import LogTail
from tests.launch.helpers import REPO, make_spec

PLACE = {
    "SUBMITIT_EXECUTOR": "slurm",
    "SLURM_JOB_ID": "905",
    "SLURM_ARRAY_JOB_ID": "7",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "node1",
    "MASTER_ADDR": "node1",
}


def run_task(folder: Path, entry: str, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    DelayedSubmission(Payload("slurm", make_spec(folder, "x", *args, entry=entry))).dump(folder / "7_3_submitted.pkl")
    command = [sys.executable, "-u", "-m", "submitit.core._submit", str(folder)]
    env = {**os.environ, **PLACE, "PYTHONPATH": str(REPO), **environ}
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def result(folder: Path) -> tuple[str, object]:
    return pickle.loads((folder / "7_3_1_result.pkl").read_bytes())


def test_a_task_learns_its_place_and_leaves_its_value(tmp_path):
    done = run_task(tmp_path, "tests.launch.entries:report", "hello", SLURM_RESTART_COUNT="1")
    assert (done.returncode, done.stderr) == (0, "dflop: start 2\n")
    (tmp_path / "log").write_text(done.stdout)
    assert list(LogTail(tmp_path / "log").read()) == ["rank 1 says hello"]
    kind, seen = result(tmp_path)
    assert kind == "success"
    assert (seen["RANK"], seen["WORLD_SIZE"], seen["MASTER_ADDR"], seen["MASTER_PORT"]) == ("1", "2", "node1", "12905")
    assert (tmp_path / "7_3_1.pid").read_text().split()[0].isdigit()
    found = handle_of(tmp_path / "7_3_submitted.pkl")
    assert (found.backend, found.job_id, found.name, found.folder) == ("slurm", "7_3", "x", tmp_path)


@pytest.mark.parametrize(
    ("entry", "args", "error"),
    [
        ("tests.launch.entries:fail_on", ("1",), "ValueError: no microbatch for rank 1"),
        ("tests.launch.nowhere:run", (), "No module named 'tests.launch.nowhere'"),
    ],
)
def test_a_task_that_fails_leaves_its_traceback_and_an_exit_code(tmp_path, entry, args, error):
    done = run_task(tmp_path, entry, *args)
    assert done.returncode == 1
    kind, trace = result(tmp_path)
    assert kind == "error"
    assert error in str(trace)
    assert error in done.stderr
    (tmp_path / "log").write_text(done.stderr)
    assert list(LogTail(tmp_path / "log").read(is_last=True)) == [], "who follows the log leaves it to the result"


def test_a_task_that_ends_itself_leaves_its_exit_code_only(tmp_path):
    assert run_task(tmp_path, "tests.launch.entries:leave_on", "1").returncode == 3
    assert not list(tmp_path.glob("*_result.pkl"))
