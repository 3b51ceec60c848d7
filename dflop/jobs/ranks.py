"""What every process of a job with several does first: take its device, join the others."""

from __future__ import annotations

import os
import resource
import sys
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


def peak_memory(device: torch.device) -> tuple[str, int]:
    """(kind, bytes) of the most memory this process has held so far; see `RankMemory`."""
    if device.type == "cuda":
        return "allocated", torch.cuda.max_memory_allocated(device)
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return "process", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


@contextmanager
def joined(device: torch.device, timeout_s: float) -> Iterator[None]:
    """Within it, the default process group of RANK, WORLD_SIZE and MASTER_* is there."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        dist.destroy_process_group()
