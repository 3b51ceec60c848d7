"""Tensors as rectangles of a whole, which is how a checkpoint stores them.

A rank writes what it holds of a parameter together with where that lies in the whole: archives of `torch.save`, one
behind the other in a file per rank, and an index that says where each piece is. A reader takes what it needs from
whatever pieces there are, however it is cut. No tensor is gathered for it.

Torch's distributed checkpoint (DCP) has the same layout. Its own index, `.metadata`, is a pickle, and unpickling can
run any code that a file names. dflop writes it for torch's own tools and never reads it: it reads the same index from
JSON, checks it against the files of the folder, and reads the tensors with `weights_only`.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dflop import files
from dflop.errors import TrainError
from dflop.parallel.part import Part
from dflop.records import from_dict, parse_json, to_dict
from dflop.train.manifest import INDEX

BlockId = tuple[str, tuple[int, ...]]
"""(name, offsets): the same on every rank that holds a copy of a block."""


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
    def id(self) -> BlockId:
        return self.name, self.offsets


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


def write_blocks(checkpoint: Path, rank: int, blocks: Iterable[Block]) -> tuple[str, list[Stored]]:
    """Write the file of a rank; it is on disk when this returns.

    Args:
        checkpoint: An existing folder.
        rank: Its number is in the file's name.
        blocks: In host memory, each in its own storage.

    Returns:
        (name of the file, the blocks as tensors of one piece each).

    Raises:
        OSError, RuntimeError: it cannot be written; `reason_of` says why.
    """
    name, found = f"__{rank}_0.distcp", []
    with open(checkpoint / name, "wb") as file:
        for block in blocks:
            begin, tensor = file.tell(), block.tensor
            torch.save(tensor, file)
            piece = Piece(block.offsets, tuple(tensor.shape), name, begin, file.tell() - begin)
            found.append(Stored(block.name, str(tensor.dtype).removeprefix("torch."), block.shape, (piece,)))
        file.flush()
        os.fsync(file.fileno())
    return name, found


def write_index(checkpoint: Path, found: Iterable[Stored]) -> None:
    """Write what `write_blocks` has returned on all ranks, once for dflop and once for torch's own tools.

    Raises:
        OSError: it cannot be written.
    """
    parts = defaultdict(list)
    for each in found:
        parts[each.name].append(each)
    tensors = [replace(of[0], pieces=tuple(piece for each in of for piece in each.pieces)) for of in parts.values()]
    content = json.dumps({"tensors": [to_dict(tensor) for tensor in tensors]})
    files.replace(checkpoint / INDEX, content, is_durable=True)
    files.replace(checkpoint / ".metadata", pickle.dumps(_metadata(tensors)), is_durable=True)


def _metadata(tensors: Iterable[Stored]) -> Metadata:
    found = Metadata({}, storage_data={})
    for tensor in tensors:
        properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
        chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in tensor.pieces]
        found.state_dict_metadata[tensor.name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
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


def fill(checkpoint: Path, index: Mapping[str, Stored], blocks: Iterable[Block]) -> None:
    """Fill blocks in place, from whatever pieces were written; types are converted.

    Raises:
        Exception: of torch, of pickle or of the disk, where a file is not what the index says; see `reason_of`.
    """
    for block in blocks:
        for piece in index[block.name].pieces:
            of_block = zip(block.offsets, block.tensor.shape, strict=True)
            of_piece = zip(piece.offsets, piece.sizes, strict=True)
            spans = [(max(a, b), min(a + m, b + n)) for (a, m), (b, n) in zip(of_block, of_piece, strict=True)]
            if all(first < end for first, end in spans):
                content = _read(checkpoint, piece)
                block.tensor[_cut(spans, block.offsets)].copy_(content[_cut(spans, piece.offsets)])


def _cut(spans: Iterable[tuple[int, int]], offsets: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(first - offset, end - offset) for (first, end), offset in zip(spans, offsets, strict=True))


def _read(checkpoint: Path, piece: Piece) -> torch.Tensor:
    with open(checkpoint / piece.file, "rb") as file:
        file.seek(piece.begin)
        archive = io.BytesIO(file.read(piece.num_bytes))
    with zipfile.ZipFile(archive) as entries:
        if sum(entry.file_size for entry in entries.infolist()) > piece.num_bytes:
            raise ValueError(f"{piece.file} is compressed")  # torch would unpack whatever that makes
    archive.seek(0)
    content = torch.load(archive, map_location="cpu", weights_only=True)
    if not isinstance(content, torch.Tensor) or content.shape != piece.sizes:
        raise ValueError(f"{piece.file} is not what the index says")
    return content


def reason_of(error: BaseException) -> str:
    """One line. Where a disk is full, torch's writer raises another error on its way out; the disk's is the reason."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno is not None):
        cause = cause.__context__
    if isinstance(cause, OSError) and cause.errno is not None:
        return os.strerror(cause.errno)
    return (str(error).splitlines() or [type(error).__name__])[0]
