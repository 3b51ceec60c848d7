"""What every process of a job with several does first: take its device, join the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from dflop.config import Config


def take_device(config: Config) -> torch.device:
    """The device of this process, by its local rank; on a CPU one thread, as cost tables assume."""
    if config.cluster.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(1)
    return torch.device("cpu")


@contextmanager
def joined(device: torch.device, timeout_s: float) -> Iterator[None]:
    """Within it, the default process group of RANK, WORLD_SIZE and MASTER_* is there."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        dist.destroy_process_group()
