from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.errors import LaunchError
from dflop.launch.ranks import port_of_job, srun_environment, tasks_per_node

# What srun --ntasks=3 set for the last task of a job on two nodes.
LAST_OF_THREE = {
    "SLURM_JOB_ID": "40",
    "SLURM_JOB_NODELIST": "node[1-3]",
    "SLURM_STEP_NODELIST": "node[2-3]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scontrol that expands `prefix[1-3]` by writing its arguments down as the first host."""
    script = tmp_path / "scontrol"
    script.write_text('#!/bin/sh\necho "$*" | tr " " ":"\necho node3\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.usefixtures("scontrol")
def test_slurms_words_become_torchs():
    assert srun_environment(LAST_OF_THREE) == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "1",
        "MASTER_ADDR": "show:hostnames:node[2-3]",
        "MASTER_PORT": "12040",
    }


def test_a_rendezvous_that_the_script_chose_is_kept():
    chosen = {"MASTER_ADDR": "node2-ib0", "MASTER_PORT": "29500"}
    found = srun_environment({**LAST_OF_THREE, **chosen})
    assert {name: found[name] for name in chosen} == chosen


def test_without_srun_the_error_says_how_to_start():
    with pytest.raises(LaunchError, match="neither RANK nor SLURM_PROCID is set") as caught:
        srun_environment({"SLURM_JOB_ID": "40"})
    assert "srun or torchrun" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3)", [2, 2, 2]), ("2,1", [2, 1]), ("8(x2),3,1(x2)", [8, 8, 3, 1, 1])]
)
def test_task_counts_are_expanded(text, counts):
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "2(x", "two", "2(x3)1"])
def test_unreadable_task_counts_are_refused(text):
    with pytest.raises(LaunchError, match="task counts"):
        tasks_per_node(text)


@given(st.integers(1, 2**32))
def test_the_port_is_neither_privileged_nor_ephemeral(job_id):
    assert 1024 < port_of_job(str(job_id)) < 32768
    assert port_of_job(str(job_id)) != port_of_job(str(job_id + 1))
