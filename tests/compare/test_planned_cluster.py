"""What a plan without a run is for: nodes and memory of a data sheet are not those of this machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.compare.planned_cluster import planned_cluster
from dflop.cost.devices import DEVICES
from dflop.errors import ConfigError
from tests.jobs.configs import make_config

HERE = ("cluster.num_processes_per_node=2", "cluster.memory_per_process_gib=3")
LOCAL_GPUS = ("cluster.num_processes_per_node=2", "cluster.memory_per_process_gib=24", "cluster.device=cuda")
SITE = ("cluster.backend=slurm", "cluster.device=cuda", "cluster.num_nodes=4", "cluster.num_processes_per_node=4",
        "cluster.memory_per_process_gib=64")  # fmt: skip
GIB, H100, H200 = 2**30, DEVICES["h100"].memory_bytes, DEVICES["h200"].memory_bytes


@pytest.mark.parametrize(
    ("configured", "options", "nodes", "memory_bytes"),
    [
        (HERE, {"device": "h100", "gpus": 64}, (8, 8), H100), (HERE, {"device": "h100", "gpus": 4}, (1, 4), H100),
        (HERE, {"device": "h200"}, (1, 2), H200),
        (HERE, {"device": "h100", "gpus": 64, "gpus_per_node": 4}, (16, 4), H100), (HERE, {"gpus": 8}, (4, 2), 3 * GIB),
        (HERE, {"gpus": 8, "gpus_per_node": 8}, (1, 8), 3 * GIB),
        (HERE, {"device": "h100", "gpus": 64, "overrides": ("cluster.num_processes_per_node=2",)}, (32, 2), H100),
        (HERE, {"device": "h100", "gpus": 8, "overrides": ("cluster.memory_per_process_gib=3",)}, (1, 8), 3 * GIB),
        (LOCAL_GPUS, {"device": "h100", "gpus": 64}, (8, 8), 24 * GIB), (SITE, {"device": "h100"}, (4, 4), 64 * GIB),
        (SITE, {"device": "h100", "gpus": 64}, (16, 4), 64 * GIB),
        (SITE, {"device": "h200", "gpus": 16, "gpus_per_node": 8}, (2, 8), 64 * GIB),
        ((*SITE, "cluster.memory_per_process_gib=200"), {"device": "h200"}, (4, 4), H200),
        ((*SITE, "cluster.device=cpu"), {"device": "a100", "gpus": 16}, (2, 8), DEVICES["a100"].memory_bytes),
    ],
)  # fmt: skip
def test_nodes_and_memory(tmp_path, configured, options, nodes, memory_bytes):
    lines = list[str]()
    found = planned_cluster(make_config(tmp_path, *configured), lines.append, **options)
    assert (found.num_nodes, found.num_processes_per_node) == nodes
    assert found.memory_per_process_bytes == memory_bytes
    assert (found.device == "cuda") == ("device" in options or "cluster.device=cuda" in configured)
    is_less = "device" in options and memory_bytes < 0.9 * DEVICES[options["device"]].memory_bytes
    assert any("cluster.memory_per_process_gib leaves" in line for line in lines) == is_less


@pytest.mark.parametrize(
    ("options", "what", "where"),
    [
        ({"gpus": 0}, "cannot plan for 0 GPUs", "--gpus"),
        ({"gpus_per_node": -1}, "cannot plan for -1 GPUs", "--gpus-per-node"),
        ({"device": "h100", "gpus": 12}, "12 GPUs are not whole nodes of 8", "--gpus"),
    ],
)
def test_what_makes_no_nodes_is_refused(tmp_path, options, what, where):
    with pytest.raises(ConfigError, match=what) as caught:
        planned_cluster(make_config(tmp_path), str, **options)
    assert caught.value.where == where


def test_a_batch_of_fewer_samples_than_gpus_is_said(tmp_path):
    lines = list[str]()
    config = make_config(tmp_path, *HERE, "plan.global_batch_size=16")
    planned_cluster(config, lines.append, device="h100", gpus=16)
    assert lines == []
    planned_cluster(config, lines.append, device="h100", gpus=64)
    assert "plan.global_batch_size is 16 for 64 processes" in lines[0]
    assert "--set plan.global_batch_size=512" in lines[0]
    site = make_config(tmp_path, *SITE, "plan.global_batch_size=15")
    planned_cluster(site, lines.append)
    assert "plan.global_batch_size is 15 for 16 processes" in lines[1]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Configurations of this machine with other numbers of processes."""
    folder = tmp_path_factory.mktemp("here")
    return [make_config(folder, f"cluster.num_processes_per_node={n}", f"cluster.num_nodes={m}")
            for n in (1, 2, 3, 4, 7) for m in (1, 2)]  # fmt: skip


@given(st.data(), st.sampled_from(list(DEVICES)), st.integers(1, 512))
def test_this_machine_decides_nothing_about_a_device_that_is_not_here(here, data, device, gpus):
    first, second = data.draw(st.sampled_from(here)), data.draw(st.sampled_from(here))
    if gpus % 8 and gpus > 8:
        with pytest.raises(ConfigError):
            planned_cluster(first, str, device=device, gpus=gpus)
        return
    found, other = (planned_cluster(c, str, device=device, gpus=gpus) for c in (first, second))
    assert (found.num_nodes, found.num_processes_per_node) == (other.num_nodes, other.num_processes_per_node)
    assert found.num_processes == gpus
