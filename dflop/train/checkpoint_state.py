"""What a checkpoint holds of one rank, and its copy in host memory, from which a thread writes while training goes on.

Names in the checkpoint: `model/NAME`, `optimizer/NAME/KEY` with global parameter names, `rng/RANK/GENERATOR`.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from dflop.errors import TrainError
from dflop.models.build import Stage
from dflop.models.weights import some_of
from dflop.parallel.part import Part
from dflop.train.blocks import Block, SafeReader, blocks_of

MODEL, OPTIMIZER, RNG = "model", "optimizer", "rng"
_PREFIX = f"{MODEL}/"


def model_blocks(stages: Iterable[Stage], parts: Mapping[str, Part]) -> Iterator[Block]:
    """Parameters of a rank's stages, views of the live ones."""
    for stage in stages:
        for name, p in stage.names.items():
            yield from blocks_of(f"{MODEL}/{name}", p, parts.get(name))


def optimizer_blocks(
    state: Mapping[str, Mapping[str, torch.Tensor]], parts: Mapping[str, Part]
) -> Iterator[Block]:  # fmt: skip
    """Optimizer state by parameter; of a part, what has the part's shape is cut like it, a count of steps is not."""
    for name, tensors in state.items():
        for key, tensor in tensors.items():
            yield from blocks_of(f"{OPTIMIZER}/{name}/{key}", tensor, parts.get(name) if tensor.dim() else None)


def rng_blocks(rank: int, state: Mapping[str, torch.Tensor]) -> Iterator[Block]:
    """States of random generators, as `rng_state` returns them."""
    for key, tensor in state.items():
        yield from blocks_of(f"{RNG}/{rank}/{key}", tensor, None)


def shapes_in(metadata: Metadata) -> dict[str, torch.Size]:
    """Shapes of all tensors in a checkpoint, by name."""
    found = metadata.state_dict_metadata
    return {name: tensor.size for name, tensor in found.items() if isinstance(tensor, TensorStorageMetadata)}


def name_problem(shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, torch.Size]) -> str:
    """What tells a checkpoint's parameters from the model's, naming a few; empty where they are the same.

    Args:
        shapes: Of the whole model, over all ranks.
        stored: Of the checkpoint.
    """
    held = {name.removeprefix(_PREFIX): shape for name, shape in shapes.items()}
    kept = {name.removeprefix(_PREFIX): tuple(shape) for name, shape in stored.items() if name.startswith(_PREFIX)}
    found = [
        some_of(held.keys() - kept.keys(), "missing from it"),
        some_of(kept.keys() - held.keys(), "unknown to the model"),
        some_of([name for name in held.keys() & kept.keys() if held[name] != kept[name]], "of another shape"),
    ]
    return f"the checkpoint is of another model; parameters {'; '.join(filter(None, found))}" if any(found) else ""


def read_model(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every parameter of a checkpoint by global name, in the type it was saved in, in one process.

    Raises:
        TrainError: it cannot be read.
    """
    reader = SafeReader(checkpoint)
    try:
        found = reader.read_metadata().state_dict_metadata
        tensors = {
            name: torch.empty(stored.size, dtype=stored.properties.dtype)
            for name, stored in found.items()
            if name.startswith(_PREFIX) and isinstance(stored, TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are no other processes
            dcp.load(dict(tensors), storage_reader=reader, no_dist=True)
    except (OSError, dcp.CheckpointException) as error:
        raise TrainError(f"cannot read checkpoint: {error}", where=str(checkpoint)) from error
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}


def share_out(blocks: Sequence[Block], group: dist.ProcessGroup) -> frozenset[MetadataIndex]:
    """Which of its blocks a rank writes: every block is written by one of those that hold a copy; collective.

    DCP would choose, too, but only when all of them have been copied to host memory.

    Args:
        blocks: What this rank holds.
        group: All ranks that hold any.
    """
    held = [SavePlan([])] * group.size()
    dist.all_gather_object(held, SavePlan([block.write_item for block in blocks]), group=group)
    shared, _ = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(held)
    return frozenset(item.index for item in shared[group.rank()].items)


class HostCopies:
    """Host memory for blocks, allocated once and used again by every copy."""

    def __init__(self) -> None:
        self._buffers: dict[MetadataIndex, torch.Tensor] = {}

    def copy(self, blocks: Iterable[Block]) -> list[Block]:
        """The blocks with their content as of now; the former copies are overwritten."""
        copies, devices = [], set()
        for block in blocks:
            buffer = self._buffers.get(block.id)
            if buffer is None:
                shape, is_cuda = block.tensor.shape, block.tensor.is_cuda
                buffer = torch.empty(shape, dtype=block.tensor.dtype, pin_memory=is_cuda)
                self._buffers[block.id] = buffer
            buffer.copy_(block.tensor, non_blocking=True)
            if block.tensor.is_cuda:
                devices.add(block.tensor.device)
            copies.append(Block(block.name, block.offsets, block.shape, buffer))
        for device in devices:
            torch.cuda.synchronize(device)
        return copies


def rng_state() -> dict[str, torch.Tensor]:
    """States of torch's, numpy's and Python's global generators, and of CUDA's where there is one, as bytes."""
    numpy_state: Any = np.random.get_state()  # noqa: NPY002, what libraries draw from without being asked
    kind, keys, *rest = numpy_state
    found = {
        "torch": torch.get_rng_state(),
        "numpy": _to_bytes([kind, keys.tolist(), *rest]),
        "python": _to_bytes(random.getstate()),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def empty_rng(stored: Mapping[str, torch.Size], rank: int) -> dict[str, torch.Tensor]:
    """Room for the states that a checkpoint has of a rank's generators."""
    prefix = f"{RNG}/{rank}/"
    return {
        name.removeprefix(prefix): torch.empty(size, dtype=torch.uint8)
        for name, size in stored.items()
        if name.startswith(prefix)
    }


def restore_rng(state: Mapping[str, torch.Tensor]) -> None:
    """Set the generators to what `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(tuple(_from_bytes(state["numpy"])))  # noqa: NPY002, as above
    version, internal, gauss_next = _from_bytes(state["python"])
    random.setstate((version, tuple(internal), gauss_next))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def reseed(seed: int, step: int, rank: int) -> None:
    """Set the generators by numbers: for ranks that no state was saved of."""
    torch_seed, numpy_seed, python_seed = np.random.SeedSequence([seed, step, rank]).generate_state(3)
    torch.manual_seed(int(torch_seed))  # CUDA's, too
    np.random.seed(int(numpy_seed))  # noqa: NPY002, as above
    random.seed(int(python_seed))


def _to_bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(content: torch.Tensor) -> Any:
    return json.loads(content.numpy().tobytes())
