"""What a sampler finds around it: which data-parallel rank it is on, and which loader and trainer draw from it.

A loader or trainer says nothing of itself when it iterates over a sampler, so the calling frames are looked at, once
per iteration. What would train other samples than planned, or some of them twice, is refused before the first batch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.utils.data.dataloader import _BaseDataLoaderIter

from dflop.errors import ConfigError
from dflop.sampler.costs_of_samples import SampleCosts
from dflop.sampler.rank_plans import WHERE, refused

_MAX_FRAMES = 60
_NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PALS_LOCAL_SIZE")
"""Set for the processes that srun, mpirun and others start."""
_DISPATCHED = (
    "Accelerate's dispatch_batches deals the batches of one process out to all; those of the others are lost",
    "leave the loader out of accelerator.prepare",
)


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
        of_process, world_size = dist.get_rank(), dist.get_world_size()
        _compare(rank, num_replicas, of_process, world_size)
    elif rank is not None and num_replicas is not None:
        of_process, world_size = rank, num_replicas
    else:
        of_process, world_size = _of_environment()
    found = of_process if rank is None else rank, world_size if num_replicas is None else num_replicas
    if not 0 <= found[0] < found[1]:
        raise refused(f"rank {found[0]} is none of {found[1]} rank(s)", "")
    return found


def _compare(rank: int | None, num_replicas: int | None, of_process: int, world_size: int) -> None:
    take_both = "give neither rank= nor num_replicas= to take both from torch.distributed"
    if num_replicas is not None and world_size % num_replicas:
        raise refused(f"the sampler deals to {num_replicas} rank(s), torch.distributed has {world_size}", take_both)
    if rank is None and num_replicas not in (None, world_size):
        raise refused(
            f"num_replicas={num_replicas} of {world_size} processes without rank=",
            "give the data-parallel rank, as model-parallel ranks of one replica share it",
        )
    if rank not in (None, of_process) and num_replicas in (None, world_size):
        raise refused(f"the sampler is of rank {rank}, this process is rank {of_process} of {world_size}", take_both)


def _of_environment() -> tuple[int, int]:
    given = os.environ
    if "RANK" in given and "WORLD_SIZE" in given:
        return int(given["RANK"]), int(given["WORLD_SIZE"])
    several = [name for name in ("WORLD_SIZE", *_NUM_TASKS) if given.get(name, "1") not in ("1", "")]
    several += [name for name in ("RANK", "LOCAL_RANK") if name in given]
    if several:
        raise PlaceUnknown(
            f"{several[0]}={given[several[0]]}, but torch.distributed is not initialised and RANK and WORLD_SIZE are "
            "not both set",
            where=WHERE,
            hint="draw the first batch after torch.distributed is initialised, or give rank= and num_replicas=",
        )
    return 0, 1


@dataclass(frozen=True, slots=True)
class LoaderContext:
    """What draws from a sampler."""

    num_prefetched: int = 0
    """Batches that a loader's workers have drawn before the first is handed out."""
    dataset: Any = None
    """Dataset of the loader; None: no loader, or its dataset has no length."""
    num_skipped: int = 0
    """Batches that Accelerate's `skip_first_batches` draws and throws away."""
    is_dispatched: bool = False
    """One of several processes draws for all, by Accelerate's `dispatch_batches`."""
    is_trainer: bool = False
    """Hugging Face's Trainer, with the same number of microbatches in every step."""


def inspect_loader() -> LoaderContext:
    """The loader and trainer above the caller's caller."""
    found: dict[str, Any] = {}
    for frame in _frames(2):
        # `self` of the methods that are being run, from the inside.
        owner: Any = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
        names = {(c.__module__.partition(".")[0], c.__name__) for c in type(owner).__mro__}
        if isinstance(owner, _BaseDataLoaderIter) and "dataset" not in found:
            found["num_prefetched"] = owner._num_workers * (getattr(owner, "_prefetch_factor", None) or 0)
            found["dataset"] = owner._dataset if hasattr(owner._dataset, "__len__") else None
        elif ("accelerate", "SkipBatchSampler") in names:
            found["num_skipped"] = owner.skip_batches
        elif ("accelerate", "DataLoaderDispatcher") in names:
            found["is_dispatched"] = owner.state.num_processes > 1
        elif ("transformers", "Trainer") in names:
            found["is_trainer"] = True
    return LoaderContext(**found)


def check_loader(context: LoaderContext, costs: SampleCosts, *, is_constant: bool, num_resumed: int) -> None:
    """Refuse what would lose, repeat or mix up samples.

    Args:
        context: What draws.
        costs: What the sampler knows of the dataset.
        is_constant: Whether every step has the same number of microbatches.
        num_resumed: Steps within the epoch that the sampler was resumed to.

    Raises:
        ConfigError: naming what to change.
    """
    if context.is_dispatched:
        raise refused(*_DISPATCHED)
    if context.is_trainer and not is_constant:
        raise refused(
            "Hugging Face's Trainer takes the same number of microbatches for every step; with max_tokens it varies",
            "give num_microbatches=, equal to gradient_accumulation_steps, in place of max_tokens=",
        )
    if context.num_skipped and num_resumed:
        raise refused(
            f"resumed twice: the sampler was resumed {num_resumed} step(s) into the epoch, and the trainer skips its "
            f"first {context.num_skipped} batch(es) by itself",
            "Hugging Face's Trainer: do not call resume, or set ignore_data_skip=True",
        )
    if context.dataset is None:
        return
    num_samples = len(context.dataset)
    if costs.index is None and len(costs) != num_samples:
        raise refused(
            f"there are costs of {len(costs)} samples, and {num_samples} samples in the loader's dataset",
            "costs must be of this dataset, in its order; of a part of it, give SampleCosts(index=...)",
        )
    if costs.index is not None and (last := int(costs.index.max())) >= num_samples:
        raise refused(
            f"there are costs of sample {last}, the loader's dataset has {num_samples} samples",
            "costs must be of this dataset",
        )


def refuse_dispatch() -> None:
    """Refuse to be prepared for Accelerate's `dispatch_batches`, on every rank: later only one of them would draw.

    Raises:
        ConfigError: the caller's caller prepares for that.
    """
    for frame in _frames(2):
        given = frame.f_locals
        if frame.f_code.co_name == "prepare_data_loader" and given.get("dispatch_batches"):
            if given.get("num_processes") != 1:
                raise refused(*_DISPATCHED)
            return


def _frames(depth: int) -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(depth)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
