"""What is said of a Slurm, with clients that answer as they do at sites."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import pytest

from dflop.config import ClusterConfig
from dflop.doctor import slurm_cluster
from dflop.doctor.finding import FAIL, OK, SKIP, WARN, Finding

PARTITIONS = "debug*|up|4|infinite|gpu:a100:8\nlow|up|2|1-00:00:00|(null)\n"
TAKEN = "sbatch: Job 2671 to start at 2026-11-23T10:00:00 using 1 processors on nodes node1 in partition debug"
REQUEUE = "JobRequeue              = 1\nKillWait                = 30 sec\nPreemptMode             = REQUEUE\n"
SOUND = {
    "sinfo": (0, PARTITIONS, ""),
    "sbatch --version": (0, "slurm-wlm 22.05.8\n", ""),
    "sbatch --test-only": (0, "", TAKEN),
    "sacct": (0, "", ""),
    "scontrol": (0, REQUEUE, ""),
}
NO_CLUSTER = "sinfo: fatal: Could not establish a configuration source"


def examined(answers, cluster=None) -> tuple[dict[str, Finding], list[str]]:
    asked: list[str] = []

    def command(args):
        line = " ".join(args)
        asked.append(line)
        for start, (code, out, err) in answers.items():
            if line.startswith(start):
                return subprocess.CompletedProcess(args, code, out, err)
        raise AssertionError(line)

    return {f.name: f for f in slurm_cluster.slurm(cluster, command)}, asked


@pytest.fixture(autouse=True)
def clients(monkeypatch):
    monkeypatch.setattr(slurm_cluster.shutil, "which", lambda name: f"/usr/bin/{name}")


@pytest.fixture
def cluster() -> Callable[..., ClusterConfig]:
    def make(**slurm: object) -> ClusterConfig:
        return ClusterConfig.model_validate(
            {"name": "c", "backend": "slurm", "num_nodes": 3, "num_processes_per_node": 8, "device": "cuda",
             "memory_per_process_gib": 80, "hardware": "A100", "slurm": slurm}
        )  # fmt: skip

    return make


def test_a_sound_cluster():
    found, _ = examined(SOUND)
    assert {f.status for f in found.values()} == {OK}
    assert found["commands"].detail == "slurm-wlm 22.05.8"
    assert found["partitions"].detail == "debug* up 4 nodes, limit infinite, low up 2 nodes, limit 1-00:00:00"
    assert found["GRES"].detail == "gpu:a100:8"
    assert found["submitting"].detail.startswith("Job 2671 to start at")
    assert found["requeueing"].detail == "JobRequeue 1, KillWait 30 sec, PreemptMode REQUEUE"
    told = "sbatch: Job 7 to start at 1795461136 using 1 processors on nodes node1 in partition debug"
    detail = examined(SOUND | {"sbatch --test-only": (0, "", told)})[0]["submitting"].detail
    assert re.fullmatch(r"Job 7 to start at (\d\d \w+ )?\d\d:\d\d using 1 .*", detail), "a time as people read it"


def test_without_clients_slurm_is_skipped_unless_it_is_wanted(monkeypatch, cluster):
    monkeypatch.setattr(slurm_cluster.shutil, "which", lambda name: None)
    (finding,) = slurm_cluster.slurm(None)
    assert finding.status == SKIP
    (finding,) = slurm_cluster.slurm(cluster())
    assert (finding.status, finding.advice) == (FAIL, "run on a login node of the cluster")


def test_clients_that_know_no_cluster_are_one_finding_and_a_controller_that_is_down_another(cluster):
    answers = {"sinfo": (1, "", f"{NO_CLUSTER}\n")}
    found, asked = examined(answers)
    assert list(found) == ["commands"]
    assert (found["commands"].status, found["commands"].detail) == (WARN, f"know no cluster: {NO_CLUSTER}")
    assert "SLURM_CONF" in found["commands"].advice
    assert len(asked) == 1
    assert examined(answers, cluster())[0]["commands"].status == FAIL
    said = "slurm_load_partitions: Unable to contact slurm controller (connect failure)"
    found, _ = examined({"sinfo": (1, "", said)}, cluster())
    assert found["commands"].detail == f"the controller does not answer: {said}"


def test_a_refused_submission_shows_what_was_asked_for(cluster):
    said = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"
    found, asked = examined(
        SOUND | {"sbatch --test-only": (1, "", said)},
        cluster(partition="debug", account="nobody", gpus="gres", gpu_type="a100", extra={"exclusive": ""}),
    )
    assert found["submitting"].status == FAIL
    assert found["submitting"].detail.startswith("error: Batch job submission failed: Invalid account")
    (line,) = (line for line in asked if "--test-only" in line)
    for option in ("--nodes=3", "--ntasks-per-node=8", "--partition=debug", "--account=nobody", "--exclusive ",
                   "--gres=gpu:a100:8"):  # fmt: skip
        assert option in line + " "
    assert line.endswith("--wrap=true")
    found, _ = examined(SOUND | {"sbatch --test-only": (1, "", said)})
    assert found["submitting"].status == WARN  # a site may want an account of everybody
