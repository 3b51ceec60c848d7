"""The engine in bfloat16 on a CPU; the same on a GPU is `tests/gpu/test_engine_gpu.py`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dflop.parallel.exchange import message_device
from tests.train.half import LAYOUTS, assert_as_exact_as_hugging_face


@pytest.mark.parametrize("name", LAYOUTS)
def test_bfloat16_is_as_exact_as_hugging_face(name, tmp_path):
    assert_as_exact_as_hugging_face(name, "cpu", tmp_path)


def test_what_gloo_carries_lies_in_host_memory(one_rank, monkeypatch):
    device = torch.device("cuda", 0)
    assert message_device(device, one_rank) == torch.device("cpu")
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    assert message_device(device, one_rank) == device
