"""`dflop doctor` on a real Slurm: four nodes of 4 CPUs, 6000 MB and 2 GPUs."""

import re
import subprocess
from collections.abc import Iterator

import pytest

from dflop.config.sbatch_options import ALLOWED, COMPUTED, REFUSED
from dflop.doctor.finding import FAIL, OK, Finding
from dflop.doctor.slurm_cluster import slurm
from dflop.doctor.trial import trial
from tests.jobs.configs import make_config, make_dataset
from tests.slurm.faults import slurm as client

SOUND = (
    "backend=slurm", "num_nodes=2", "num_processes_per_node=2", "num_cores_per_node=4", "memory_per_process_gib=0.9",
    "hardware=x", "slurm.time_limit_min=10",
)  # fmt: skip


@pytest.fixture(scope="module")
def partitions(cluster: None) -> Iterator[None]:
    client("scontrol", "create", "partitionname=short", "nodes=ALL", "maxtime=5", "state=UP")
    client("scontrol", "create", "partitionname=small", "nodes=ALL", "maxnodes=1", "state=UP")
    client("scontrol", "create", "partitionname=closed", "nodes=ALL", "state=DOWN")
    yield
    for name in ("short", "small", "closed"):
        client("scontrol", "delete", f"partitionname={name}")


def examined(folder, *overrides: str) -> list[Finding]:
    return list(slurm(make_config(folder, *(f"cluster.{override}" for override in (*SOUND, *overrides)))))


@pytest.mark.lane("slurm-heart")
def test_every_option_of_the_installed_sbatch_is_known(cluster):
    shown = client("sbatch", "--help")
    assert set(re.findall(r"--([a-z][a-z-]*[a-z])", shown)) - {*ALLOWED, *COMPUTED, *REFUSED} == set()


def test_a_real_cluster_is_told_and_nothing_is_submitted(partitions, tmp_path):
    before = subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True).stdout
    found = {finding.name: finding for finding in examined(tmp_path)}
    for name in ("commands", "partitions", "submitting data-0", "submitting profile-links", "requeueing"):
        assert found[name].status == OK, found[name]
    assert found["submitting data-0"].detail.startswith("Job ")
    assert "JobRequeue" in found["requeueing"].detail
    assert subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True).stdout == before


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("slurm.partition=nowhere", "cluster.slurm.partition"),
        ("slurm.partition=short", "cluster.slurm.time_limit_min"), ("slurm.partition=small", "cluster.num_nodes"),
        ("slurm.partition=closed", "cluster.slurm.partition"),
        ("memory_per_process_gib=8", "cluster.memory_per_process_gib"),
        ("slurm.extra={mem: 900T}", "cluster.slurm.extra"),
        ("slurm.extra={mem-per-cpu: 600M}", "cluster.slurm.ask_for_memory"),
        ("slurm.extra={mem_per_gpu: 600M}", "cluster.slurm.ask_for_memory"), ("num_nodes=5", "cluster.num_nodes"),
        ("num_processes_per_node=5", "cluster.num_processes_per_node"),
        ("slurm.extra={gpus_per_node: '3'}", "cluster.num_processes_per_node"),
    ],
)  # fmt: skip
def test_what_would_not_start_is_a_failure_that_names_the_key(partitions, tmp_path, override, key):
    failed = [finding for finding in examined(tmp_path, override) if finding.status == FAIL]
    assert any(key in finding.advice for finding in failed), failed


def test_trial_jobs_see_the_nodes_and_get_the_signal(cluster, tmp_path):
    make_dataset(tmp_path)
    config = make_config(tmp_path, *(f"cluster.{override}" for override in SOUND))
    found = {finding.name: finding for finding in trial(config, poll_interval_s=1)}
    assert {finding.status for finding in found.values()} == {OK}, found
    assert found["profile-links"].detail.startswith("4 tasks on node")
