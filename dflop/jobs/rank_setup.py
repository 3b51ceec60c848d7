"""What every process of a job with several does first: take its device, join the others."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from dflop.config import Config
from dflop.train import wire

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Settings of torch's allocator: the name of today, and the one it had."""


def take_device(config: Config) -> torch.device:
    """The device of this process, by its local rank; on a CPU one thread, as cost tables assume."""
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if config.cluster.device == "cuda":
        if not any(name in os.environ for name in _ALLOCATOR):
            os.environ[_ALLOCATOR[0]] = "expandable_segments:True"  # sizes differ from microbatch to microbatch
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) // config.cluster.ranks_per_gpu)
        torch.cuda.set_device(device)
        if config.cluster.ranks_per_gpu > 1:  # the rank that needs more fails, not its neighbour
            torch.cuda.set_per_process_memory_fraction(1 / config.cluster.ranks_per_gpu)
        return device
    torch.set_num_threads(1)
    return torch.device("cpu")


def peak_memory(device: torch.device) -> dict[str, int]:
    """By kind, the most memory this process has held so far, bytes; see `RankMemory`."""
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    found = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes}
    return found | ({"allocated": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {})


def join(backend: str, timeout_s: float) -> None:
    """Make the default process group of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, with as many files as allowed.

    Ranks find each other on a store that listens where `wire.open_store` says. Under torchrun it is torchrun's own,
    which listens on every address.
    """
    # gloo opens a socket per rank and group, and login shells often limit a process to 1,024 files.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError):  # macOS has no largest number
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    timeout = timedelta(seconds=timeout_s)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = wire.master_host(os.environ), int(os.environ["MASTER_PORT"])
    store = wire.open_store(host, port, is_server=rank == 0, timeout_s=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)


@contextmanager
def joined(backend: str, timeout_s: float) -> Iterator[None]:
    """Within it, the default process group of RANK, WORLD_SIZE and MASTER_* is there."""
    join(backend, timeout_s)
    try:
        yield
    finally:
        dist.destroy_process_group()
