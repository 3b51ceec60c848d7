"""What is said of a Slurm, with clients that answer as they do at sites."""

import subprocess
import time
from collections.abc import Callable

import pytest

from dflop.config import Config
from dflop.doctor import slurm_cluster
from dflop.doctor.finding import FAIL, OK, SKIP, WARN, Finding
from tests.jobs.configs import make_config

NODES = """\
debug*|up|infinite|1-infinite|2|4|6000|gpu:2|idle
debug*|up|infinite|1-infinite|2|4|6000|gpu:2|mix
short|up|5:00|1-infinite|4|4|6000|gpu:2|idle
small|up|1-00:00:00|1-1|4|4|6000|gpu:2|idle
closed|down|infinite|1-infinite|4|4|6000|gpu:2|idle
broken|up|infinite|1-infinite|1|4|6000|gpu:2|idle
broken|up|infinite|1-infinite|3|4|6000|gpu:2|down*
mixed|up|infinite|1-infinite|1|2|64000|gpu:a100:8(S:0-1),gpu:h100:1|idle
mixed|up|infinite|1-infinite|1|64|1000|(null)|idle
"""
TAKEN = "sbatch: Job 2671 to start at 2026-11-23T10:00:00 using 1 processors on nodes node1 in partition debug"
REQUEUE = "JobRequeue              = 1\nKillWait                = 30 sec\nPreemptMode             = REQUEUE\n"
SOUND = {
    "sinfo": (0, NODES, ""),
    "sbatch --version": (0, "slurm-wlm 22.05.8\n", ""),
    "sbatch --test-only": (0, "", TAKEN),
    "sacct": (0, "", ""),
    "scontrol": (0, REQUEUE, ""),
    "sdiag": (0, "****\nsdiag output at now (NOW)\n", ""),
}
NO_CLUSTER = "sinfo: fatal: Could not establish a configuration source"


def examined(answers, config=None) -> tuple[dict[str, Finding], list[str]]:
    asked: list[str] = []

    def command(args, environment=None):
        line = " ".join(args)
        asked.append(line)
        for start, (code, out, err) in answers.items():
            if line.startswith(start):
                return subprocess.CompletedProcess(args, code, out.replace("NOW", f"{time.time():.0f}"), err)
        raise AssertionError(line)

    return {f.name: f for f in slurm_cluster.slurm(config, command)}, asked


@pytest.fixture(autouse=True)
def clients(monkeypatch):
    monkeypatch.setattr(slurm_cluster.shutil, "which", lambda name: f"/usr/bin/{name}")


@pytest.fixture
def config(tmp_path) -> Callable[..., Config]:
    def make(*overrides: str) -> Config:
        sound = ("num_nodes=2", "num_processes_per_node=2", "memory_per_process_gib=0.9", "hardware=x", "backend=slurm")
        given = [f"cluster.{override}" for override in (*sound, "slurm.time_limit_min=10", *overrides)]
        return make_config(tmp_path, "data_profile.num_workers=2", *given)

    return make


def test_a_controller_whose_clock_is_off_is_a_warning():
    found, _ = examined({**SOUND, "sdiag": (0, f"sdiag output at then ({time.time() - 300:.0f})", "")})
    assert (found["clocks"].status, "differ by 5 min" in found["clocks"].detail) == (WARN, True)
    found, _ = examined({**SOUND, "sdiag": (1, "", "slurm_get_statistics: Access denied")})
    assert found["clocks"].status == SKIP


def test_a_sound_cluster():
    found, _ = examined(SOUND)
    assert {f.status for f in found.values()} == {OK}
    assert found["commands"].detail == "slurm-wlm 22.05.8"
    assert found["partitions"].detail.startswith("debug* up 4 nodes, limit infinite, short up 4 nodes, limit 5:00, ")
    assert found["GRES"].detail.startswith("gpu:2, gpu:a100:8")
    assert found["submitting"].detail.startswith("Job 2671 to start at")
    assert found["requeueing"].detail == "JobRequeue 1, KillWait 30 sec, PreemptMode REQUEUE"


def test_without_clients_slurm_is_skipped_unless_it_is_wanted(monkeypatch, config):
    monkeypatch.setattr(slurm_cluster.shutil, "which", lambda name: None)
    (finding,) = slurm_cluster.slurm(None)
    assert finding.status == SKIP
    (finding,) = slurm_cluster.slurm(config())
    assert (finding.status, finding.advice) == (FAIL, "run on a login node of the cluster")


def test_clients_that_know_no_cluster_are_one_finding_and_a_controller_that_is_down_another(config):
    answers = {"sinfo": (1, "", f"{NO_CLUSTER}\n")}
    found, asked = examined(answers)
    assert list(found) == ["commands"]
    assert (found["commands"].status, found["commands"].detail) == (WARN, f"find no cluster: {NO_CLUSTER}")
    assert "SLURM_CONF" in found["commands"].advice
    assert len(asked) == 1
    assert examined(answers, config())[0]["commands"].status == FAIL
    said = "slurm_load_partitions: Unable to contact slurm controller (connect failure)"
    found, _ = examined({"sinfo": (1, "", said)}, config())
    assert found["commands"].detail == f"the controller does not respond: {said}"


def test_sbatch_is_asked_for_what_will_be_submitted(config):
    found, asked = examined(SOUND, config("slurm.partition=debug", "slurm.extra={mem_per_gpu: 600M, exclusive: ''}"))
    lines = [line + " " for line in asked if "--test-only" in line]
    assert len(lines) == 3, "of the data profile, of the model profile, and of the links and the training, alike"
    data, model, train = lines
    for line, wanted in (
        (data, "--nodes=1 --ntasks-per-node=1 --cpus-per-task=2"), (model, "--nodes=1 --ntasks-per-node=1"),
        (train, "--nodes=2 --ntasks-per-node=2 --cpus-per-task=1 --mem=1843M --time=10"),
    ):  # fmt: skip
        assert {*wanted.split(), "--partition=debug", "--mem-per-gpu=600M", "--exclusive", "--wrap=true"} <= {
            *line.split()
        }
    assert {name for name in found if name.startswith("submitting")} == {
        "submitting data-0", "submitting profile-tp1", "submitting profile-links",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("fatal: --mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive.", "cluster.slurm.ask_for_memory"),
        ("error: Memory specification can not be satisfied", "cluster.memory_per_process_gib"),
        ("error: Batch job submission failed: Invalid account or account/partition combination", "slurm.account"),
        ("error: it is Tuesday", "the cluster section"),
    ],
)
def test_a_refusal_names_the_key_and_the_options(config, said, key):
    answers = SOUND | {"sbatch --test-only": (1, "", f"sbatch: {said}")}
    finding = examined(answers, config())[0]["submitting data-0"]
    assert (finding.status, finding.detail) == (FAIL, said)
    assert key in finding.advice
    assert "--time=10" in finding.advice
    assert examined(answers)[0]["submitting"].status == WARN  # a site may want an account of everybody


@pytest.mark.parametrize(
    ("overrides", "said", "key"),
    [
        (["slurm.partition=short"], "--time=10, partition `short` allows 5:00", "cluster.slurm.time_limit_min"),
        (["slurm.partition=small"], "2 nodes, partition `small` allows 1", "cluster.num_nodes"),
        (["num_nodes=5"], "5 nodes, partition `debug` has 4", "cluster.num_nodes"),
        (["slurm.partition=closed"], "partition `closed` is down", "cluster.slurm.partition"),
        (["memory_per_process_gib=8"], "16384 MiB of memory on each of 2 nodes, those of partition `debug` have 6000",
         "cluster.memory_per_process_gib"),
        (["slurm.extra={mem-per-cpu: 4G}", "slurm.ask_for_memory=false"], "8192 MiB of memory", "cluster.slurm.extra"),
        (["num_processes_per_node=5"], "5 CPUs on each of 2 nodes", "cluster.num_processes_per_node"),
        (["device=cuda", "num_processes_per_node=4"], "4 GPUs on each of 2 nodes, those of partition `debug` have 2",
         "cluster.num_processes_per_node"),
        (["device=cuda", "slurm.gpu_type=a100", "slurm.gpus=gres"], "2 GPUs of type a100", "cluster.slurm.gpu_type"),
        (["slurm.partition=mixed", "num_nodes=1", "memory_per_process_gib=2", "num_processes_per_node=4"],
         "1 nodes of partition `mixed` that have 4 CPUs, 8192 MiB and 0 GPUs: there are 0", "cluster.slurm.partition"),
    ],
)  # fmt: skip
def test_what_sbatch_would_take_and_never_start_is_found(config, overrides, said, key):
    found, _ = examined(SOUND, config(*overrides))
    meant = [finding for finding in found.values() if said in finding.detail]
    assert meant
    for finding in meant:
        assert (finding.status, finding.detail.endswith(": it would never start")) == (FAIL, True)
        assert key in finding.advice


def test_nodes_that_are_down_are_waited_for_and_of_several_partitions_the_best_counts(config):
    found = examined(SOUND, config("slurm.partition=broken"))[0].values()
    (detail,) = {f.detail for f in found if f.status == WARN}
    assert detail == "3 of 4 nodes of partition `broken` are down or drained; the job waits for them"
    found = examined(SOUND, config("slurm.partition='short,debug'"))[0].values()
    assert {f.status for f in found} == {OK}
    assert examined(SOUND, config("slurm.partition='debug,nowhere'"))[0]["partitions"].status == FAIL
