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
from dflop.train import wire

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Settings of torch's allocator: the name of today, and the one it had."""


def take_device(config: Config) -> torch.device:
    """The device of this process, by its local rank; on a CPU one thread, as cost tables assume."""
    if config.cluster.device == "cuda":
        if not any(name in os.environ for name in _ALLOCATOR):
            os.environ[_ALLOCATOR[0]] = "expandable_segments:True"  # sizes differ from microbatch to microbatch
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(1)
    return torch.device("cpu")


def peak_memory(device: torch.device) -> dict[str, int]:
    """By kind, the most memory this process has held so far, bytes; see `RankMemory`."""
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    found = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes}
    return found | ({"allocated": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {})


def join(device: torch.device, timeout_s: float) -> None:
    """Make the default process group of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Ranks find each other on a store that listens where `wire.open_store` says. Under torchrun it is torchrun's own,
    which listens on every address.
    """
    backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = wire.master_host(os.environ), int(os.environ["MASTER_PORT"])
    store = wire.open_store(host, port, is_server=rank == 0, timeout_s=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)


@contextmanager
def joined(device: torch.device, timeout_s: float) -> Iterator[None]:
    """Within it, the default process group of RANK, WORLD_SIZE and MASTER_* is there."""
    join(device, timeout_s)
    try:
        yield
    finally:
        dist.destroy_process_group()
