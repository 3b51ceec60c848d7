"""What a checkpoint says of its tensors, read so that nothing in it runs.

torch's distributed checkpoint (DCP) keeps its index, `.metadata`, as a pickle, and reads it as one: whoever wrote the
file could have any code run by whoever loads it. Here a pickle's words become inert stand-ins, made anew for every
file; a name that is not on the list ends the reading. What they say is then checked against the files beside it, and
only then built into torch's own records. Tensors themselves torch reads with `weights_only`.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dflop.errors import TrainError
from dflop.train.manifest import INDEX

_METADATA = "torch.distributed.checkpoint.metadata"
_NAMES = frozenset({
    (_METADATA, "Metadata"), (_METADATA, "TensorStorageMetadata"), (_METADATA, "TensorProperties"),
    (_METADATA, "ChunkStorageMetadata"), (_METADATA, "MetadataIndex"), (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"), ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
})  # fmt: skip
"""All that torch's writer puts into an index of plain tensors; element types are looked up by name."""
_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")


class SafeReader(FileSystemReader):
    """DCP's reader, with the index read as `read_index` does."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        found = read_index(self._folder)
        found.storage_meta = StorageMeta(load_id=self.load_id)
        return found


def read_index(checkpoint: Path) -> Metadata:
    """The index of a checkpoint folder.

    Raises:
        TrainError: it names anything but tensors in files of its own folder, or is damaged.
        OSError: it cannot be read.
    """
    raw = (checkpoint / INDEX).read_bytes()
    try:
        return _built(_Unpickler(raw).load(), checkpoint)
    except OSError:
        raise
    except Exception as error:  # an unpickler raises anything on crafted bytes; each is one bad file
        reason = str(error) if isinstance(error, pickle.UnpicklingError | _Unfit) else "it is damaged"
        raise TrainError(
            f"the index of the checkpoint is refused: {reason}",
            where=str(checkpoint / INDEX),
            hint="dflop loads checkpoints that dflop has written; weights from elsewhere: model.weights, safetensors",
        ) from None


class _Unfit(ValueError):
    """An index that says something no writer of ours would."""


class _Said:
    """Stands for an object of a pickle: what it was called with, and its state. It does nothing."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> _Said:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Makes stand-ins. Their classes are this object's own, so that what a pickle does to a class is gone with it."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw))
        self._classes: dict[str, type[_Said]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return name
        if (module, name) not in _NAMES:
            raise _Unfit(f"it names `{module}.{name}`")
        if name not in self._classes:
            made: Any = type(name, (_Said,), {})
            self._classes[name] = made
        return self._classes[name]


def _built(said: Any, folder: Path) -> Metadata:
    """Torch's records of what an index says."""
    top = _fields(said, "Metadata")
    tensors = {_text(name): _tensor(value) for name, value in top["state_dict_metadata"].items()}
    sizes_bytes: dict[str, int] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for key, value in top["storage_data"].items():
        index, place = _index(key), _place(value)
        name = place.relative_path
        if name not in sizes_bytes:
            if not (folder / name).is_file():
                raise _Unfit(f"`{name}` is not a file of the checkpoint")
            sizes_bytes[name] = (folder / name).stat().st_size
        if place.offset + place.length > sizes_bytes[name]:
            raise _Unfit(f"`{index.fqn}` lies beyond the end of {name}")
        places[index] = place
    for name, tensor in tensors.items():
        _check_room(name, tensor, places)
    return Metadata(state_dict_metadata=dict(tensors), storage_data=places)


def _check_room(name: str, tensor: TensorStorageMetadata, places: dict[MetadataIndex, _StorageInfo]) -> None:
    """A tensor is all of its pieces, and none is larger than its bytes: what it says is what loading will take."""
    if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size):
        raise _Unfit(f"the pieces of `{name}` do not cover it")
    for chunk in tensor.chunks:
        place = places.get(MetadataIndex(name, chunk.offsets))
        if place is None or place.length < math.prod(chunk.sizes) * tensor.properties.dtype.itemsize:
            raise _Unfit(f"`{name}` is larger than what is stored of it")


def _tensor(said: Any) -> TensorStorageMetadata:
    fields = _fields(said, "TensorStorageMetadata")
    dtype_name, *_ = _state(fields["properties"], "TensorProperties", tuple)
    dtype = getattr(torch, _text(dtype_name), None)
    if not isinstance(dtype, torch.dtype):
        raise _Unfit(f"`{dtype_name}` is not an element type")
    size = _sizes(fields["size"])
    chunks = []
    for value in fields["chunks"]:
        chunk = _fields(value, "ChunkStorageMetadata")
        offsets, sizes = _sizes(chunk["offsets"]), _sizes(chunk["sizes"])
        if any(o + s > w for o, s, w in zip(offsets, sizes, size, strict=True)):
            raise _Unfit("a piece lies outside its tensor")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _index(said: Any) -> MetadataIndex:
    fields = _fields(said, "MetadataIndex")
    return MetadataIndex(_text(fields["fqn"]), _sizes(fields["offset"]))


def _place(said: Any) -> _StorageInfo:
    fields = _fields(said, "_StorageInfo")
    name = _text(fields["relative_path"])
    if not _DATA_FILE.fullmatch(name) or fields.get("transform_descriptors"):
        raise _Unfit(f"`{name}` is not a tensor file")
    return _StorageInfo(name, _whole(fields["offset"]), _whole(fields["length"]))


def _fields(said: Any, name: str) -> dict[str, Any]:
    fields: dict[str, Any] = _state(said, name, dict)
    return fields


def _state(said: Any, name: str, kind: type) -> Any:
    if not isinstance(said, _Said) or type(said).__name__ != name or not isinstance(said.state, kind):
        raise _Unfit(f"it is not made of tensors alone: no {name} where one belongs")
    return said.state


def _sizes(said: Any) -> torch.Size:
    if not isinstance(said, _Said) or type(said).__name__ != "Size" or len(said.args) > 1:
        raise _Unfit("a size is invalid")
    return torch.Size([_whole(n) for n in (said.args[0] if said.args else ())])


def _whole(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise _Unfit(f"{value!r:.40} is not a number of bytes or elements")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Unfit(f"{value!r:.40} is not a name")
    return value
