"""The cluster section that `dflop init --cluster slurm` makes of what sinfo says."""

import subprocess

import pytest
from ruamel.yaml import YAML

from dflop.config.sections import ClusterConfig
from dflop.errors import ConfigError
from dflop.starter.clusters import find_cluster

H100 = "gpu*|up|1-00:00:00|1-infinite|16|96|2000000|gpu:h100:8(S:0-1)|idle"
OLD = "old|up|infinite|1-infinite|40|64|512000|gpu:a100-40:4|mix"
CPUS = "cpu|up|2:00:00|1-4|100|128|256000|(null)|idle"
DOWN = "big|down|infinite|1-infinite|99|96|2000000|gpu:b200:8|idle"


@pytest.fixture
def found(monkeypatch):
    """The cluster of a Slurm whose sinfo answers with these lines."""
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")

    def find(*lines, name="slurm", code=0, error=""):
        done = subprocess.CompletedProcess([], code, "\n".join(lines) + "\n", error)
        return find_cluster(name, lambda command: done)

    return find


def section(cluster):
    """As a configuration reads it."""
    return ClusterConfig.model_validate(YAML(typ="safe").load("\n".join(cluster.lines))["cluster"])


def test_the_partition_in_use_with_most_gpus_is_described(found):
    cluster = found(H100, OLD, CPUS, DOWN)
    said = section(cluster)
    assert (said.num_nodes, said.num_processes_per_node, said.device, said.num_cores_per_node) == (40, 4, "cuda", 64)
    assert (said.slurm.partition, said.slurm.gpu_type, said.slurm.time_limit_min) == ("old", "a100-40", 240)
    assert (cluster.num_processes, cluster.has_gpus) == (160, True)
    assert "40 nodes of partition `old` with 4 GPUs (a100-40) each" in cluster.note


def test_a_named_partition_is_taken_and_gpus_have_the_memory_of_their_data_sheet(found):
    said = section(found(H100, OLD, CPUS, name="slurm:gpu"))
    assert (said.num_nodes, said.num_processes_per_node, said.slurm.partition) == (16, 8, "gpu")
    assert said.memory_per_process_gib == pytest.approx(80, rel=0.1)
    assert "H100" in said.hardware.upper()


def test_memory_of_gpus_that_nobody_knows_is_to_be_edited(found):
    (line,) = [line for line in found("x*|up|infinite|1-infinite|2|8|64000|gpu:2|idle").lines if "memory_per" in line]
    assert "EDIT" in line


def test_nodes_without_gpus_have_their_memory_in_parts_and_the_limits_of_their_partition(found):
    cluster = found(CPUS)
    said = section(cluster)
    assert (said.num_nodes, said.num_processes_per_node, said.device, said.hardware) == (4, 4, "cpu", "cpu")
    assert said.memory_per_process_gib == pytest.approx(0.9 * 256000 / 1024 / 4, rel=0.01)
    assert (said.slurm.time_limit_min, cluster.has_gpus) == (120, False)


@pytest.mark.parametrize(
    ("lines", "named", "message", "hint"),
    [
        ([H100], {"name": "slurm:gpo"}, "no partition `gpo`", "did you mean `gpu`"),
        ([DOWN], {}, "no node of any partition is in use", "dflop doctor"),
        (
            [],
            {"code": 1, "error": "slurm_load_partitions: Unable to contact slurm controller"},
            "sinfo fails",
            "doctor",
        ),
        ([], {"name": "k8s"}, "`k8s` is no cluster", "slurm:PARTITION"),
    ],
)
def test_what_cannot_be_described_is_one_error(found, lines, named, message, hint):
    with pytest.raises(ConfigError, match=message) as raised:
        found(*lines, **named)
    assert hint in raised.value.hint


def test_a_machine_without_slurm_says_so(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match="no sinfo"):
        find_cluster("slurm")
