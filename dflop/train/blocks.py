"""Tensors as rectangles of a whole, which is how torch's distributed checkpoint (DCP) writes and reads them.

A rank hands over what it holds of a parameter together with where that lies in the whole; DCP puts the pieces together
for whoever reads, however the reader is cut. No tensor is gathered for it.

DCP pickles its index, `.metadata`, and unpickling can run any code that a file names. dflop writes it for torch's
own tools and never reads it. It reads the same index from JSON, checks it against the files of the folder, and then
builds torch's records from it. torch reads the tensors with `weights_only`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dflop.errors import TrainError
from dflop.parallel.part import Part
from dflop.records import from_dict, parse_json, to_dict
from dflop.train.manifest import INDEX, write_json

_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of a named tensor."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole tensor."""
    tensor: torch.Tensor
    """The content; a view of what the rank holds."""

    @property
    def id(self) -> MetadataIndex:
        """The same on every rank that holds a copy of the block."""
        return MetadataIndex(self.name, self.offsets)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)

    @property
    def write_item(self) -> WriteItem:
        properties = TensorProperties.create_from_tensor(self.tensor)
        data = TensorWriteData(self.chunk, properties, torch.Size(self.shape))
        return WriteItem(self.id, WriteItemType.SHARD, tensor_data=data)


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


class BlockSavePlanner(DefaultSavePlanner):
    """Writes blocks; no two ranks may hand over the same."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        super().__init__(flatten_state_dict=False)
        self._blocks = {block.id: block for block in blocks}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([block.write_item for block in self._blocks.values()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._blocks[index].tensor


class BlockWriter(FileSystemWriter):
    """Writes the blocks of a rank to one file, and says what the disk said when it fails."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)  # what it is given is in host memory

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # On its way out of a full disk, torch's archive writer fails in another way, and that is what it raises.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        write_index(Path(self.path), metadata)


class BlockLoadPlanner(DefaultLoadPlanner):
    """Fills blocks in place, from whatever pieces were written; types are converted."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._blocks = {block.id: block for block in blocks}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for block in self._blocks.values():
            stored = self.metadata.state_dict_metadata[block.name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(block.name, stored, [block.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._blocks[index].tensor


class SafeReader(FileSystemReader):
    """DCP's reader, with the index read as `read_index` does."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        found = read_index(self._folder)
        found.storage_meta = StorageMeta(load_id=self.load_id)
        return found


@dataclass(frozen=True, slots=True)
class _Piece:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[_Piece, ...]


@dataclass(frozen=True, slots=True)
class _Index:
    tensors: tuple[_Tensor, ...]


def write_index(checkpoint: Path, metadata: Metadata) -> None:
    """Write what DCP says of tensors that it has written.

    Raises:
        OSError: it cannot be written.
    """
    tensors = []
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        pieces = []
        for chunk in stored.chunks:
            place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            pieces.append(
                _Piece(tuple(chunk.offsets), tuple(chunk.sizes), place.relative_path, place.offset, place.length)
            )
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        tensors.append(_Tensor(name, dtype, tuple(stored.size), tuple(pieces)))
    write_json(checkpoint / INDEX, to_dict(_Index(tuple(tensors))))


def read_index(checkpoint: Path) -> Metadata:
    """The index of a checkpoint folder.

    Raises:
        TrainError: it names something other than tensors in the checkpoint's files, or is damaged.
        OSError: it cannot be read.
    """
    raw = (checkpoint / INDEX).read_bytes()
    try:
        return _built(from_dict(_Index, parse_json(raw)), checkpoint)
    except (ValueError, TypeError) as error:
        reason = str(error) if isinstance(error, _UnfitError) else "it is damaged"
        raise TrainError(
            f"the index of the checkpoint is refused: {reason}",
            where=str(checkpoint / INDEX),
            hint="dflop loads checkpoints that dflop has written; weights from elsewhere: model.weights, safetensors",
        ) from None


class _UnfitError(ValueError):
    """An index that says something no writer of ours would."""


def _built(index: _Index, folder: Path) -> Metadata:
    """Torch's records of what an index says.

    A tensor is all of its pieces, and none is larger than its bytes: what it says is what loading will take.
    """
    places: dict[MetadataIndex, _StorageInfo] = {}
    tensors: dict[str, TensorStorageMetadata] = {}
    sizes_bytes: dict[str, int] = {}
    for tensor in index.tensors:
        name, dtype = tensor.name, getattr(torch, tensor.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise _UnfitError(f"`{tensor.dtype}` is not an element type")
        if not all(0 <= size < 1 << 63 for size in tensor.shape):
            raise _UnfitError("a size is invalid")
        if sum(math.prod(piece.sizes) for piece in tensor.pieces) != math.prod(tensor.shape):
            raise _UnfitError(f"the pieces of `{name}` do not cover it")
        for piece in tensor.pieces:
            if piece.file not in sizes_bytes:
                sizes_bytes[piece.file] = _size_bytes(folder, piece.file)
            _check(piece, tensor, dtype.itemsize, sizes_bytes[piece.file])
            place = _StorageInfo(piece.file, piece.begin, piece.num_bytes)
            places[MetadataIndex(name, torch.Size(piece.offsets))] = place
        chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in tensor.pieces]
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(tensor.shape), chunks)
    return Metadata(state_dict_metadata=dict(tensors), storage_data=places)


def _size_bytes(folder: Path, file: str) -> int:
    if not _DATA_FILE.fullmatch(file):
        raise _UnfitError(f"`{file}` is not a tensor file")
    if not (folder / file).is_file():
        raise _UnfitError(f"`{file}` is not a file of the checkpoint")
    return (folder / file).stat().st_size


def _check(piece: _Piece, tensor: _Tensor, value_bytes: int, file_bytes: int) -> None:
    if min(*piece.offsets, *piece.sizes, piece.begin, piece.num_bytes, 0) < 0 or any(
        offset + size > whole for offset, size, whole in zip(piece.offsets, piece.sizes, tensor.shape, strict=True)
    ):
        raise _UnfitError("a piece lies outside its tensor")
    if piece.begin + piece.num_bytes > file_bytes:
        raise _UnfitError(f"`{tensor.name}` lies beyond the end of {piece.file}")
    if piece.num_bytes < math.prod(piece.sizes) * value_bytes:
        raise _UnfitError(f"`{tensor.name}` is larger than what is stored of it")
