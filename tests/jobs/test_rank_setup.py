"""What a rank does first. No CUDA: which device it would take, and how much of it."""

from __future__ import annotations

import pytest
import torch

from dflop.jobs.rank_setup import take_device
from tests.jobs.configs import make_config


@pytest.mark.parametrize(
    ("ranks_per_gpu", "devices", "shares", "collectives"),
    [(1, [0, 1, 2, 3], [], "nccl"), (2, [0, 0, 1, 1], [0.5] * 4, "gloo"), (4, [0, 0, 0, 0], [0.25] * 4, "gloo")],
)
def test_neighbours_share_a_gpu_and_its_memory(tmp_path, monkeypatch, ranks_per_gpu, devices, shares, collectives):
    config = make_config(tmp_path, "cluster.device=cuda", f"cluster.ranks_per_gpu={ranks_per_gpu}")
    taken, given = [], []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", given.append)
    for local_rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        assert take_device(config) == taken[-1]
    assert [device.index for device in taken] == devices
    assert given == shares
    assert config.cluster.collectives == collectives


def test_determinism_is_asked_of_torch(tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    take_device(make_config(tmp_path))
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        take_device(make_config(tmp_path, "train.deterministic=true"))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled(), "torch's attention would stay as it is"
    finally:
        torch.use_deterministic_algorithms(False)
