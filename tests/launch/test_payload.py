"""What a task of a Slurm job does, started as srun would start it, and how it learns its place."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from submitit.core.utils import DelayedSubmission

from dflop.errors import LaunchError
from dflop.launch.payload import Payload, srun_environment, tasks_per_node
from dflop.launch.results import handle_of
from dflop.launch.tail import LogTail
from tests.launch.helpers import REPO, make_spec

PLACE = {
    "SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "905", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "node1", "MASTER_ADDR": "node1",
}  # fmt: skip


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


# What srun --ntasks=3 set for the last task of a job on two nodes.
LAST_OF_THREE = {
    "SLURM_JOB_ID": "40", "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_NTASKS": "3", "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "MASTER_ADDR": "node2-ib0",
}  # fmt: skip


def test_slurms_words_become_torchs():
    expected = {
        "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "1",
        "MASTER_ADDR": "node2-ib0", "MASTER_PORT": "12040",
    }  # fmt: skip
    assert srun_environment(LAST_OF_THREE) == expected
    chosen = {"MASTER_PORT": "29500"}
    assert srun_environment({**LAST_OF_THREE, **chosen}) == expected | chosen


@pytest.mark.parametrize(
    "changed",
    [{"SLURM_PROCID": None}, {"MASTER_ADDR": None}, {"SLURM_NODEID": "2"}, {"SLURM_STEP_TASKS_PER_NODE": "two"}],
)
def test_without_srun_the_error_says_how_to_start(changed):
    environ = {name: value for name, value in {**LAST_OF_THREE, **changed}.items() if value is not None}
    with pytest.raises(LaunchError, match="neither RANK nor all of srun's variables are set") as caught:
        srun_environment(environ)
    assert "torchrun" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3)", [2, 2, 2]), ("2,1", [2, 1]), ("8(x2),3,1(x2)", [8, 8, 3, 1, 1])]
)
def test_task_counts_are_expanded(text, counts):
    assert tasks_per_node(text) == counts


@given(st.integers(1, 2**32))
def test_the_port_is_neither_privileged_nor_ephemeral(job_id):
    first, second = (
        int(srun_environment({**LAST_OF_THREE, "SLURM_JOB_ID": str(n)})["MASTER_PORT"]) for n in (job_id, job_id + 1)
    )
    assert 1024 < first < 32768
    assert first != second
