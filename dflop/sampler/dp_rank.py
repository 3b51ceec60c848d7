"""Which data-parallel rank this is, of how many: as given, or as torch.distributed or torchrun's variables say."""

from __future__ import annotations

import os

import torch.distributed as dist

from dflop.errors import ConfigError

_WHERE = "BalancedBatchSampler"
_HINT = "draw the first batch after torch.distributed is initialised, or give rank= and num_replicas="
_NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PALS_LOCAL_SIZE")
"""Set for the processes that srun, mpirun and others start."""


class PlaceUnknown(ConfigError):
    """There are several processes, and nothing says yet which of them this is."""


def find_place(rank: int | None, num_replicas: int | None) -> tuple[int, int]:
    """(rank, number of ranks).

    Args:
        rank: As given; None: looked up.
        num_replicas: As given; None: looked up.

    Raises:
        PlaceUnknown: nothing says which of several processes this is.
        ConfigError: what is given contradicts itself or torch.distributed.
    """
    if dist.is_available() and dist.is_initialized():
        found = _compared(rank, num_replicas, dist.get_rank(), dist.get_world_size())
    elif rank is not None and num_replicas is not None:
        found = rank, num_replicas
    else:
        of_env = _of_environment()
        found = of_env[0] if rank is None else rank, of_env[1] if num_replicas is None else num_replicas
    if not 0 <= found[0] < found[1]:
        raise ConfigError(f"rank {found[0]} is none of {found[1]} rank(s)", where=_WHERE)
    return found


def _compared(rank: int | None, num_replicas: int | None, of_process: int, world_size: int) -> tuple[int, int]:
    if num_replicas is None:
        num_replicas = world_size
    if world_size % num_replicas:
        raise ConfigError(
            f"the sampler deals to {num_replicas} rank(s), torch.distributed has {world_size}",
            where=_WHERE,
            hint="give neither rank= nor num_replicas= to take both from torch.distributed",
        )
    if rank is None and num_replicas != world_size:
        raise ConfigError(
            f"num_replicas={num_replicas} of {world_size} processes without rank=",
            where=_WHERE,
            hint="give the data-parallel rank, as model-parallel ranks of one replica share it",
        )
    if rank is not None and num_replicas == world_size and rank != of_process:
        raise ConfigError(
            f"the sampler is of rank {rank}, this process is rank {of_process} of {world_size}",
            where=_WHERE,
            hint="give neither rank= nor num_replicas= to take both from torch.distributed",
        )
    return of_process if rank is None else rank, num_replicas


def _of_environment() -> tuple[int, int]:
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is not None and world_size is not None:
        return int(rank), int(world_size)
    several = [f"{name}={os.environ[name]}" for name in ("WORLD_SIZE", *_NUM_TASKS) if _is_several(name)]
    several += [f"{name}={os.environ[name]}" for name in ("RANK", "LOCAL_RANK") if name in os.environ]
    if several:
        raise PlaceUnknown(
            f"{several[0]}, but torch.distributed is not initialised and RANK and WORLD_SIZE are not both set",
            where=_WHERE,
            hint=_HINT,
        )
    return 0, 1


def _is_several(name: str) -> bool:
    return os.environ.get(name, "1") not in ("1", "")
