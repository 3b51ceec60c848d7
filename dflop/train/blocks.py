"""Tensors as rectangles of a whole, which is how torch's distributed checkpoint (DCP) writes and reads them.

A rank hands over what it holds of a parameter together with where that lies in the whole; DCP puts the pieces together
for a reader, however that is cut. No tensor is gathered for it.

DCP pickles its index, `.metadata`, and unpickling can run any code that a file names. dflop writes it for torch's
own tools and never reads it. It reads the same index from JSON, checks it against the files of the folder, and then
builds torch's records from it. torch reads the tensors with `weights_only`.
"""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dflop import files
from dflop.errors import TrainError
from dflop.parallel.part import Part
from dflop.records import from_dict, parse_json, to_dict
from dflop.train.manifest import INDEX


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of a named tensor."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    tensor: torch.Tensor
    """The content; a view of what the rank holds."""

    @property
    def id(self) -> MetadataIndex:
        """The same on every rank that holds a copy of the block."""
        return MetadataIndex(self.name, self.offsets)

    @property
    def chunk(self) -> dcp.ChunkStorageMetadata:
        return dcp.ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)

    @property
    def write_item(self) -> dcp.WriteItem:
        properties = TensorProperties.create_from_tensor(self.tensor)
        data = TensorWriteData(self.chunk, properties, torch.Size(self.shape))
        return dcp.WriteItem(self.id, WriteItemType.SHARD, tensor_data=data)


def blocks_of(name: str, tensor: torch.Tensor, part: Part | None) -> Iterator[Block]:
    """What a rank holds of a tensor, as blocks.

    Args:
        name: In the checkpoint.
        tensor: What the rank holds.
        part: Which part that is; None: the whole.
    """
    tensor = tensor.detach()
    if part is None:
        yield Block(name, (0,) * tensor.dim(), tuple(tensor.shape), tensor)
        return
    for offsets, view in part.pieces(tensor):
        if view.numel():  # more ranks than rows leave some without any
            yield Block(name, offsets, part.shape, view)


class BlockSavePlanner(dcp.DefaultSavePlanner):
    """Writes blocks; of those that several ranks hand over DCP takes one."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        super().__init__(flatten_state_dict=False)
        self._blocks = {block.id: block for block in blocks}

    def create_local_plan(self) -> dcp.SavePlan:
        self.plan = dcp.SavePlan([block.write_item for block in self._blocks.values()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._blocks[index].tensor


class BlockLoadPlanner(dcp.DefaultLoadPlanner):
    """Fills blocks in place, from whatever pieces were written; types are converted."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._blocks = {block.id: block for block in blocks}

    def create_local_plan(self) -> dcp.LoadPlan:
        assert self.metadata is not None
        items = []
        for block in self._blocks.values():
            stored = self.metadata.state_dict_metadata[block.name]
            assert isinstance(stored, dcp.TensorStorageMetadata)
            items += create_read_items_for_chunk_list(block.name, stored, [block.chunk])
        return dcp.LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._blocks[index].tensor


class BlockWriter(dcp.FileSystemWriter):
    """DCP's writer, which leaves the index in JSON, too, and says why the disk refused a file."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise RuntimeError(reason_of(error)) from None  # what led to an error does not travel to other ranks

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        content = json.dumps({"tensors": [to_dict(stored) for stored in _stored(metadata, places)]})
        files.replace(Path(self.path) / INDEX, content, is_durable=True)


class SafeReader(dcp.FileSystemReader):
    """DCP's reader, with the index of `read_index` instead of the pickled one; it refuses compressed archives."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.index = read_index(folder)

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> dcp.Metadata:
        return _metadata(self.index.values())

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        for index in {item.storage_index for item in plan.items}:
            at = self.storage_data[index]
            with open(Path(self.path) / at.relative_path, "rb") as file:
                file.seek(at.offset)
                archive = io.BytesIO(file.read(at.length))
            with zipfile.ZipFile(archive) as entries:
                if sum(entry.file_size for entry in entries.infolist()) > at.length:
                    raise ValueError(f"{at.relative_path} is compressed")  # torch would unpack whatever that makes
        return super().read_data(plan, planner)


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a rectangle of a tensor lies, in the tensor and on disk."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def empty(self) -> torch.Tensor:
        """Room for it, to be filled."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype))


def _stored(metadata: dcp.Metadata, places: Mapping[MetadataIndex, _StorageInfo]) -> Iterator[Stored]:
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, dcp.TensorStorageMetadata)
        pieces = []
        for chunk in tensor.chunks:
            at = places[MetadataIndex(name, chunk.offsets)]
            pieces.append(Piece(tuple(chunk.offsets), tuple(chunk.sizes), at.relative_path, at.offset, at.length))
        yield Stored(name, str(tensor.properties.dtype).removeprefix("torch."), tuple(tensor.size), tuple(pieces))


def _metadata(tensors: Iterable[Stored]) -> dcp.Metadata:
    found = dcp.Metadata({}, storage_data={})
    for tensor in tensors:
        properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
        chunks = [dcp.ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in tensor.pieces]
        found.state_dict_metadata[tensor.name] = dcp.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for piece in tensor.pieces:
            place = _StorageInfo(piece.file, piece.begin, piece.num_bytes)
            found.storage_data[MetadataIndex(tensor.name, piece.offsets)] = place
    return found


def read_index(checkpoint: Path) -> dict[str, Stored]:
    """The tensors of a checkpoint by name.

    Raises:
        TrainError: the index names something other than tensors in the checkpoint's files, or is damaged.
        OSError: it cannot be read.
    """
    raw = (checkpoint / INDEX).read_bytes()
    sizes_bytes = {path.name: path.stat().st_size for path in checkpoint.glob("__*.distcp") if path.is_file()}
    try:
        tensors = {found.name: found for found in (from_dict(Stored, each) for each in parse_json(raw)["tensors"])}
        problem = next((each for tensor in tensors.values() for each in _problems(tensor, sizes_bytes)), "")
    except (ValueError, TypeError, KeyError):
        problem = "it is damaged"
    if problem:
        raise TrainError(
            f"the index of the checkpoint is refused: {problem}",
            where=str(checkpoint / INDEX),
            hint="dflop loads checkpoints that dflop has written; weights from elsewhere: model.weights, safetensors",
        )
    return tensors


def _problems(tensor: Stored, sizes_bytes: Mapping[str, int]) -> Iterator[str]:
    """What no writer of ours would say of a tensor.

    A tensor is all of its pieces, and none is larger than its bytes: what the index says is what loading will take.
    """
    name, dtype = tensor.name, getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        yield f"`{tensor.dtype}` is not an element type"
        return
    if not all(0 <= size < 1 << 63 for size in tensor.shape):
        yield "a size is invalid"
    if sum(math.prod(piece.sizes) for piece in tensor.pieces) != math.prod(tensor.shape):
        yield f"the pieces of `{name}` do not cover it"
    for piece in tensor.pieces:
        if min(*piece.offsets, *piece.sizes, piece.begin, piece.num_bytes, 0) < 0 or any(
            offset + size > whole for offset, size, whole in zip(piece.offsets, piece.sizes, tensor.shape, strict=True)
        ):
            yield "a piece lies outside its tensor"
        if piece.file not in sizes_bytes:
            yield f"`{piece.file}` is not a tensor file of the checkpoint"
        elif piece.begin + piece.num_bytes > sizes_bytes[piece.file]:
            yield f"`{name}` lies beyond the end of {piece.file}"
        if piece.num_bytes < math.prod(piece.sizes) * dtype.itemsize:
            yield f"`{name}` is larger than what is stored of it"


def reason_of(error: BaseException) -> str:
    """One line. Where a disk is full, torch's writer raises another error on its way out; the disk's is the reason.

    Of an error that DCP collected it is the first rank's.
    """
    if isinstance(error, dcp.CheckpointException):
        rank, (first, _) = min(error.failures.items())
        return f"rank {rank}: {reason_of(first)}"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return os.strerror(cause.errno)
        cause = cause.__context__
    return (str(error).splitlines() or [type(error).__name__])[0]
