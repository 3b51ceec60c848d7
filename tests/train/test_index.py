"""Checkpoints from elsewhere: what their index says is checked, and nothing in it runs."""

from __future__ import annotations

import json
import os
import pickle
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

from dflop.errors import TrainError
from dflop.files import TMP_PREFIX
from dflop.train import checkpoint_state, manifest
from dflop.train.blocks import BlockSavePlanner, BlockWriter, blocks_of
from dflop.train.index import SafeReader, read_index
from dflop.train.manifest import INDEX

TENSORS = {"model/w": torch.arange(12.0).reshape(3, 4), "optimizer/w/step": torch.tensor(2.0), "rng/0/t": torch.ones(5)}


@pytest.fixture
def checkpoint(tmp_path):
    """A folder as `Checkpointer` writes it."""
    folder = tmp_path / TMP_PREFIX
    blocks = [block for name, tensor in TENSORS.items() for block in blocks_of(name, tensor, None)]
    dcp.save({}, storage_writer=BlockWriter(folder), planner=BlockSavePlanner(blocks), no_dist=True)
    return announced(folder, tmp_path)


def announced(folder, parent):
    """A folder as the newest checkpoint, its checksums in order."""
    files = {path.name: manifest.file_state(path) for path in folder.iterdir() if path.name != manifest.MANIFEST}
    manifest.publish(folder, {"next_step": 1, "name": manifest.name_of(1)}, files, keep=1)
    return parent / manifest.name_of(1)


def changed(checkpoint, change):
    """The index after `change` of what torch reads from it; the checksum fits."""
    with open(checkpoint / INDEX, "rb") as file:
        content = pickle.load(file)
    change(content)
    (checkpoint / INDEX).write_bytes(pickle.dumps(content))


def test_it_says_what_torch_reads(checkpoint):
    with open(checkpoint / INDEX, "rb") as file:
        theirs = pickle.load(file)
    ours = read_index(checkpoint)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    reader = SafeReader(checkpoint)
    assert reader.read_metadata().storage_meta == StorageMeta(load_id=reader.load_id)
    assert torch.equal(checkpoint_state.read_model(checkpoint)["w"], TENSORS["model/w"])


def test_every_element_type_of_weights(tmp_path):
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)
    tensors = {f"model/{n}": torch.zeros(3, 2).to(dtype) for n, dtype in enumerate(dtypes)}
    blocks = [block for name, tensor in tensors.items() for block in blocks_of(name, tensor, None)]
    dcp.save({}, storage_writer=BlockWriter(tmp_path), planner=BlockSavePlanner(blocks), no_dist=True)
    assert [tensor.dtype for tensor in checkpoint_state.read_model(tmp_path).values()] == list(dtypes)


class Runs:
    """Pickled, a call of `function`."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("function", "named"), [(os.mkdir, "posix.mkdir"), (eval, "builtins.eval"), (getattr, "builtins.getattr")]
)
def test_nothing_in_it_runs(checkpoint, tmp_path, function, named):
    target = str(tmp_path / "ran")
    args = {os.mkdir: (target,), eval: (f"__import__('os').mkdir({target!r})",), getattr: ("text", "upper")}[function]
    (checkpoint / INDEX).write_bytes(pickle.dumps(Runs(function, *args)))
    announced(checkpoint.rename(tmp_path / ".tmp-again"), tmp_path)  # checksums keep nobody from this
    assert manifest.newest_sound(tmp_path)[0]["next_step"] == 1
    with pytest.raises(TrainError, match=f"refused: it names `{named}`"):
        checkpoint_state.read_model(checkpoint)
    assert not (tmp_path / "ran").exists()


def test_what_a_pickle_does_to_a_class_is_gone_with_it(checkpoint):
    # `Metadata` itself as the object whose state is set: (None, {"spoilt": 1}) goes through setattr.
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (checkpoint / INDEX).write_bytes(b"\x80\x02" + name + b"(NX\x06\x00\x00\x00spoiltK\x01s}t" + b"b.")
    with pytest.raises(TrainError, match="is refused"):
        read_index(checkpoint)
    assert not hasattr(dcp.metadata.Metadata, "spoilt")


def place(content, **fields):
    """Where the tensor lies, other than it is."""
    key = next(key for key in content.storage_data if key.fqn == "model/w")
    old = content.storage_data[key]
    values = {"relative_path": old.relative_path, "offset": old.offset, "length": old.length} | fields
    content.storage_data[key] = _StorageInfo(**values)


def resize(content, *size, chunk=None):
    """What the index says of the tensor, and of its only piece."""
    tensor = content.state_dict_metadata["model/w"]
    tensor.size = torch.Size(size)
    if chunk is not None:
        tensor.chunks[0].sizes = torch.Size(chunk)


def wrong_type(content):
    content.state_dict_metadata["model/w"].size = "12"


def outside_itself(content):
    content.state_dict_metadata["model/w"].chunks[0].offsets = torch.Size([1, 0])


def nowhere(content):
    content.storage_data = {key: value for key, value in content.storage_data.items() if key.fqn != "model/w"}


A_PETABYTE = (1 << 24, 1 << 24)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (wrong_type, "a size is invalid"),
        (partial(place, relative_path="../../etc/passwd"), "`../../etc/passwd` is not a tensor file"),
        (partial(place, relative_path="/etc/passwd"), "`/etc/passwd` is not a tensor file"),
        (partial(place, offset=1 << 40), "`model/w` lies beyond the end of __0_0.distcp"),
        (partial(place, transform_descriptors=["zstd"]), "not a tensor file"),
        (lambda c: resize(c, *A_PETABYTE, chunk=A_PETABYTE), "`model/w` is larger than what is stored of it"),
        (lambda c: resize(c, 300, 4), "the pieces of `model/w` do not cover it"),
        (outside_itself, "a piece lies outside its tensor"),
        (nowhere, "`model/w` is larger than what is stored of it"),
    ],
)
def test_what_it_says_is_checked_against_the_files(checkpoint, change, told):
    changed(checkpoint, change)
    with pytest.raises(TrainError) as caught:
        read_index(checkpoint)
    assert told in str(caught.value)
    assert str(checkpoint / INDEX) in str(caught.value)


@pytest.mark.parametrize("cut", [0, 1, 40, 300])
def test_a_damaged_one_is_one_error(checkpoint, cut):
    raw = (checkpoint / INDEX).read_bytes()
    (checkpoint / INDEX).write_bytes(raw[:cut])
    with pytest.raises(TrainError, match=r"^the index of the checkpoint is refused: "):
        read_index(checkpoint)
    (checkpoint / INDEX).write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    with pytest.raises(TrainError, match="not made of tensors alone"):
        read_index(checkpoint)


def edit_manifest(checkpoint, edit):
    content = json.loads((checkpoint / manifest.MANIFEST).read_text())
    edit(content)
    (checkpoint / manifest.MANIFEST).write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["../stolen", "/etc/hostname", "..", "a/b", ""])
def test_a_manifest_names_files_of_its_folder(checkpoint, name):
    edit_manifest(checkpoint, lambda content: content["files"].update({name: [0, 0]}))
    with pytest.raises(ValueError, match="names files outside the checkpoint"):
        manifest.read_manifest(checkpoint)


def test_a_manifest_cannot_send_to_another_folder_nor_leave_out_the_index(checkpoint):
    edit_manifest(checkpoint, lambda content: content["meta"].update(name="../../elsewhere"))
    assert manifest.newest_sound(checkpoint.parent)[0]["name"] == checkpoint.name
    edit_manifest(checkpoint, lambda content: content["files"].pop(INDEX))
    assert manifest.newest_sound(checkpoint.parent) == (None, ["step-00000001: manifest.json does not list .metadata"])


def test_a_pipe_in_place_of_a_file_is_not_waited_for(checkpoint):
    (checkpoint / "__0_0.distcp").unlink()
    os.mkfifo(checkpoint / "__0_0.distcp")
    assert manifest.newest_sound(checkpoint.parent) == (None, ["step-00000001: __0_0.distcp is not a regular file"])


def test_tensors_are_read_weights_only(checkpoint):
    """The bytes of a tensor are a pickle, too; torch's restricted unpickler reads it."""
    index = read_index(checkpoint)
    where = index.storage_data[MetadataIndex("model/w", torch.Size([0, 0]))]
    path = checkpoint / where.relative_path
    raw, target = bytearray(path.read_bytes()), checkpoint.parent / "ran"
    torch.save(Runs(os.mkdir, str(target)), checkpoint.parent / "hostile")
    hostile = (checkpoint.parent / "hostile").read_bytes()
    assert len(hostile) <= where.length
    raw[where.offset : where.offset + where.length] = b""
    path.write_bytes(bytes(raw[: where.offset]) + hostile + bytes(raw[where.offset :]))

    def moved(content):
        for key, value in content.storage_data.items():
            offset = len(hostile) - where.length + value.offset if value.offset > where.offset else value.offset
            length = len(hostile) if key.fqn == "model/w" else value.length
            content.storage_data[key] = _StorageInfo(value.relative_path, offset, length)

    changed(checkpoint, moved)
    with pytest.raises(TrainError, match="cannot read checkpoint"):
        checkpoint_state.read_model(checkpoint)
    assert not target.exists()
