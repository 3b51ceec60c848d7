"""What a checkpoint holds of one rank, and its copy in host memory, from which a thread writes while training goes on.

Names in the checkpoint: `model/NAME`, `optimizer/NAME/KEY` with global parameter names.
"""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from dflop.errors import ConfigError, TrainError
from dflop.models.build import Stage
from dflop.models.weights import some_of
from dflop.parallel.part import Part, rows_part
from dflop.progress import At, unseen
from dflop.train.blocks import Block, SafeReader, Stored, blocks_of, reason_of
from dflop.train.optim import AVERAGE, State

OPTIMIZER = "optimizer"
_PREFIX = "model/"
_ALIGNED_BYTES = 64
_PORTABLE = 1
"""`cudaHostRegisterPortable`."""


def state_blocks(
    stages: Iterable[Stage], optimizer: State, parts: Mapping[str, Part], base: Collection[str] = (),
    rows: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> list[Block]:  # fmt: skip
    """All of a rank's state as views of the live tensors.

    Args:
        stages: Holders of the parameters.
        optimizer: As `Optimizer.state` returns it. Of a part, what has the part's shape is cut like it, a count of
            steps is not.
        parts: What the rank holds of the parameters that it does not hold whole.
        base: Names of parameters that are left out.
        rows: `Optimizer.rows`.
    """
    model = {name: p for stage in stages for name, p in stage.names.items() if name not in base}
    found = [blocks_of(f"{_PREFIX}{name}", p, parts.get(name)) for name, p in model.items()]
    for name, tensors in optimizer.items():
        part = parts.get(name)
        if name in rows:
            part = rows_part(tuple(model[name].shape), rows[name], part)
        for key, tensor in tensors.items():
            found.append(blocks_of(f"{OPTIMIZER}/{name}/{key}", tensor, part if tensor.dim() else None))
    return list(chain(*found))


def name_problem(shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, Stored]) -> str:
    """What tells a checkpoint's parameters from the model's, naming a few; empty where they are the same.

    Args:
        shapes: Of what all ranks hold, by name in the checkpoint.
        stored: The checkpoint's tensors.
    """
    held = {name.removeprefix(_PREFIX): shape for name, shape in shapes.items() if name.startswith(_PREFIX)}
    kept = {name.removeprefix(_PREFIX): of.shape for name, of in stored.items() if name.startswith(_PREFIX)}
    found = [
        some_of(held.keys() - kept.keys(), "missing from it"),
        some_of(kept.keys() - held.keys(), "unknown to the model"),
        some_of([name for name in held.keys() & kept.keys() if held[name] != kept[name]], "of another shape"),
    ]
    return f"the checkpoint is of another model; parameters {'; '.join(filter(None, found))}" if any(found) else ""


def read_model(checkpoint: Path, at: At = unseen, *, is_average: bool = False) -> dict[str, torch.Tensor]:
    """Every parameter of a checkpoint by global name, in the type it was saved in, in one process.

    Args:
        checkpoint: Its folder.
        at: Receives how far reading is.
        is_average: Whether to read the average over steps of those that train.

    Raises:
        ConfigError: it has no averages.
        TrainError: it cannot be read.
    """
    try:
        reader = SafeReader(checkpoint)
        names = {name: name.removeprefix(_PREFIX) for name in reader.index if name.startswith(_PREFIX)}
        averaged = {
            f"{_PREFIX}{n}": key for n in names.values() if (key := f"{OPTIMIZER}/{n}/{AVERAGE}") in reader.index
        }
        if is_average and not averaged:
            hint = "train.ema_decay keeps one from the next start of the job on"
            raise ConfigError("the checkpoint has no average of the weights", where=str(checkpoint), hint=hint)
        stored = {averaged.get(name, name) if is_average else name: short for name, short in names.items()}
        tensors = {name: reader.index[name].empty() for name in stored}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are no other processes
            dcp.load(dict(tensors), storage_reader=reader, planner=_Watched(at), no_dist=True)
    except (OSError, dcp.CheckpointException) as error:
        raise TrainError(f"cannot read checkpoint: {reason_of(error)}", where=str(checkpoint)) from error
    return {stored[name]: tensor for name, tensor in tensors.items()}


_READING = "reading the checkpoint, pieces of tensors"


class _Watched(dcp.DefaultLoadPlanner):
    """DCP's, which reports how many pieces of tensors are read."""

    def __init__(self, at: At) -> None:
        super().__init__()
        self._at, self._num_read, self._num_pieces = at, 0, 0

    def finish_plan(self, new_plan: dcp.LoadPlan) -> dcp.LoadPlan:
        self._num_pieces = len(new_plan.items)
        self._at(_READING, 0, self._num_pieces)
        return super().finish_plan(new_plan)

    def commit_tensor(self, read_item: dcp.ReadItem, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        self._num_read += 1
        self._at(_READING, self._num_read, self._num_pieces)


def host_memory(blocks: Iterable[Block]) -> dict[MetadataIndex, torch.Tensor]:
    """Room for a copy of each block, all in one piece, page-locked where blocks are on a GPU.

    torch's own page-locked memory comes in powers of two: up to twice the state, of every rank of a node.
    """
    tensors = {block.id: block.tensor for block in blocks}
    ends = [*accumulate(-(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for tensor in tensors.values())]
    whole = np.empty(ends[-1] if ends else 0, np.uint8)
    if any(tensor.is_cuda for tensor in tensors.values()):
        _page_lock(whole)
    found = {}
    for (name, tensor), start in zip(tensors.items(), [0, *ends], strict=False):
        # With a storage of its size: of a larger one the writer would make a copy.
        room = torch.from_numpy(whole[start : start + tensor.nbytes])
        found[name] = room.view(tensor.dtype).view(tensor.shape)
    return found


def _page_lock(memory: np.ndarray) -> None:
    """Lock memory for as long as it lives; where that is refused, copies into it take longer."""
    cuda: Any = torch.cuda.cudart()
    address = memory.ctypes.data
    if error := int(cuda.cudaHostRegister(address, memory.nbytes, _PORTABLE)):
        said = f"cannot page-lock {memory.nbytes} bytes for checkpoints (CUDA error {error}); copies take longer"
        print(said, file=sys.stderr, flush=True)
    else:
        weakref.finalize(memory, cuda.cudaHostUnregister, address)


def not_finite(blocks: Iterable[Block]) -> str:
    """Name of a block that holds a NaN or an infinity; empty where none does. Takes no memory of their size."""
    by_device: dict[torch.device, list[Block]] = {}
    for block in blocks:
        if block.tensor.is_floating_point() and block.tensor.numel():
            by_device.setdefault(block.tensor.device, []).append(block)
    for of_device in by_device.values():
        largest = torch._foreach_norm([block.tensor for block in of_device], math.inf)
        for block, is_finite in zip(of_device, torch.stack(largest).isfinite().tolist(), strict=True):
            if not is_finite:
                return block.name
    return ""


def copy_to_host(blocks: Sequence[Block], memory: Mapping[MetadataIndex, torch.Tensor]) -> list[Block]:
    """The blocks that there is memory for, with their content as of now; what was there is overwritten."""
    mine = [block for block in blocks if block.id in memory]
    copies = [replace(block, tensor=memory[block.id].copy_(block.tensor, non_blocking=True)) for block in mine]
    for device in {block.tensor.device for block in mine if block.tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return copies
