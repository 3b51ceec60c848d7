"""`dflop doctor` on a real Slurm."""

from __future__ import annotations

import subprocess

from dflop.config import ClusterConfig
from dflop.doctor.finding import FAIL, OK
from dflop.doctor.slurm_cluster import slurm


def cluster_of(**slurm_options: object) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {"name": "c", "backend": "slurm", "num_nodes": 2, "num_processes_per_node": 1, "memory_per_process_gib": 0.1,
         "hardware": "x", "slurm": slurm_options}
    )  # fmt: skip


def test_a_real_cluster_is_told_and_nothing_is_submitted(cluster):
    before = subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True).stdout
    found = {finding.name: finding for finding in slurm(cluster_of())}
    for name in ("commands", "partitions", "submitting", "requeueing"):
        assert found[name].status == OK, found[name]
    assert found["submitting"].detail.startswith("Job ")
    assert "JobRequeue" in found["requeueing"].detail
    assert subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True).stdout == before


def test_what_the_cluster_would_refuse_is_refused_in_its_words(cluster):
    found = {finding.name: finding for finding in slurm(cluster_of(partition="nowhere"))}
    assert found["partitions"].status == found["submitting"].status == FAIL
    many = cluster_of(extra={"mem": "900T"})
    assert {finding.name: finding for finding in slurm(many)}["submitting"].status == FAIL
