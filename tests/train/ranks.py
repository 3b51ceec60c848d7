"""Start ranks from a fork server that has imported torch and transformers once: four ranks in a second, not twenty."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOAD = ["tests.train.preloaded"]
"""Of every test that forks: a process has one server, which imports what its first user asks for."""


def run_ranks(worker: Callable[..., Any], num_ranks: int, folder: Path, *args: Any) -> list[Any]:
    """`worker(rank, folder, *args)` in a gloo group of `num_ranks` processes; the results in rank order.

    Results go through `torch.save` files: a queue would hide a worker's traceback.
    """
    multiprocessing.set_forkserver_preload(PRELOAD)
    mp.start_processes(_rank, (worker, num_ranks, str(folder), args), nprocs=num_ranks, start_method="forkserver")
    return [torch.load(folder / f"rank-{r}.pt", weights_only=False) for r in range(num_ranks)]


def _rank(rank: int, worker: Callable[..., Any], num_ranks: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks)
    torch.save(worker(rank, Path(folder), *args), f"{folder}/rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
