"""Start ranks from a fork server that has imported torch and transformers once: four ranks in a second, not twenty."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOAD = ["tests.train.preloaded"]
"""Of every test that forks: a process has one server, which imports what its first user asks for."""


def start_server() -> None:
    """Let the server import what it will fork, beside whatever this process does meanwhile."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()


def run_ranks(worker: Callable[..., Any], num_ranks: int, folder: Path, *args: Any) -> list[Any]:
    """`worker(rank, folder, *args)` in a gloo group of `num_ranks` processes; the results in rank order.

    Results go through `torch.save` files: a queue would hide a worker's traceback.
    """
    (folder / "rendezvous").unlink(missing_ok=True)  # of an earlier start in this folder
    start(_rank, num_ranks, worker, num_ranks, str(folder), args)
    return [torch.load(folder / f"rank-{r}.pt", weights_only=False) for r in range(num_ranks)]


def start(worker: Callable[..., Any], num_processes: int, *args: Any) -> None:
    """`worker(number, *args)` in so many processes, to their end."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    mp.start_processes(worker, args, nprocs=num_processes, start_method="forkserver")


def _rank(rank: int, worker: Callable[..., Any], num_ranks: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks)
    torch.save(worker(rank, Path(folder), *args), f"{folder}/rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
