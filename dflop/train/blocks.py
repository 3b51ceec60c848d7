"""Tensors as rectangles of a whole, which is how torch's distributed checkpoint (DCP) writes and reads them.

A rank hands over what it holds of a parameter together with where that lies in the whole; DCP puts the pieces together
for whoever reads, however the reader is cut. No tensor is gathered for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
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

from dflop.parallel.part import Part
from dflop.train.index import write_index

BlockId = tuple[str, tuple[int, ...]]
"""Name of a tensor, and where in it a block begins: the same on every rank that holds a copy of the block."""


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

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)


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
        self.plan = SavePlan([_write_item(block) for block in self._blocks.values()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return _found(self._blocks, index).tensor


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

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._blocks = {block.id: block for block in blocks}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, found in groupby(sorted(self._blocks.values(), key=lambda b: b.id), key=lambda b: b.name):
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, stored, [block.chunk for block in found])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return _found(self._blocks, index).tensor


def _write_item(block: Block) -> WriteItem:
    properties = TensorProperties.create_from_tensor(block.tensor)
    return WriteItem(
        MetadataIndex(block.name, torch.Size(block.offsets)),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(block.chunk, properties, torch.Size(block.shape)),
    )


def _found(blocks: dict[BlockId, Block], index: MetadataIndex) -> Block:
    assert index.offset is not None
    return blocks[index.fqn, tuple(index.offset)]
