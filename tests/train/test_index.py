"""Checkpoints from elsewhere: what their index says is checked, and nothing in it runs."""

from __future__ import annotations

import json
import os
import pickle
import resource
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dflop.errors import TrainError
from dflop.files import TMP_PREFIX
from dflop.train import checkpoint_state, manifest
from dflop.train.blocks import BlockSavePlanner, BlockWriter, SafeReader, blocks_of, read_index, reason_of
from dflop.train.manifest import INDEX

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TENSORS = {"model/w": torch.arange(12.0).reshape(3, 4), "optimizer/w/step": torch.tensor(2.0), "rng/0/t": torch.ones(5)}


def write(folder, tensors):
    """What one rank writes that holds all of them."""
    blocks = [block for name, tensor in tensors.items() for block in blocks_of(name, tensor, None)]
    dcp.save({}, storage_writer=BlockWriter(folder), planner=BlockSavePlanner(blocks), no_dist=True)


@pytest.fixture
def checkpoint(tmp_path):
    """A folder as `Checkpointer` writes it."""
    folder = tmp_path / TMP_PREFIX
    write(folder, TENSORS)
    return announced(folder, tmp_path)


def announced(folder, parent):
    """A folder as the newest checkpoint, its checksums in order."""
    files = {path.name: manifest.file_state(path) for path in folder.iterdir() if path.name != manifest.MANIFEST}
    manifest.publish(folder, {"next_step": 1, "name": manifest.name_of(1)}, files, keep=1)
    return parent / manifest.name_of(1)


def changed(checkpoint, change):
    """The index after `change` of it, of which `model/w` is the first tensor; the checksum fits."""
    content = json.loads((checkpoint / INDEX).read_text())
    change(content["tensors"][0])
    (checkpoint / INDEX).write_text(json.dumps(content))


def test_it_says_what_torch_reads(checkpoint):
    with open(checkpoint / ".metadata", "rb") as file:
        theirs = pickle.load(file)
    ours = SafeReader(checkpoint).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    dcp.load(found, checkpoint_id=checkpoint, no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert torch.equal(checkpoint_state.read_model(checkpoint)["w"], TENSORS["model/w"])


def test_a_file_of_plain_archives_is_read(tmp_path):
    """What dflop wrote in November 2026, with `torch.save`."""
    index = []
    with open(tmp_path / "__0_0.distcp", "wb") as file:
        for row, half in enumerate(TENSORS["model/w"].split((1, 2))):
            begin = file.tell()
            torch.save(half.clone(), file)
            at = {"offsets": [row, 0], "sizes": list(half.shape), "file": "__0_0.distcp"}
            index.append({**at, "begin": begin, "num_bytes": file.tell() - begin})
    tensor = {"name": "model/w", "dtype": "float32", "shape": [3, 4], "pieces": index}
    (tmp_path / INDEX).write_text(json.dumps({"tensors": [tensor]}))
    assert torch.equal(checkpoint_state.read_model(tmp_path)["w"], TENSORS["model/w"])


def test_a_file_that_finds_no_room_fails_for_that_reason(tmp_path):
    """Torch's writer then raises an error that names no disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(dcp.CheckpointException) as caught:
            write(tmp_path, {"model/w": torch.zeros(1 << 20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert reason_of(caught.value) == "rank 0: File too large"


def test_every_element_type_of_weights(tmp_path):
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)
    tensors = {f"model/{n}": torch.zeros(3, 2).to(dtype) for n, dtype in enumerate(dtypes)}
    write(tmp_path, tensors)
    assert [tensor.dtype for tensor in checkpoint_state.read_model(tmp_path).values()] == list(dtypes)


class Runs:
    """Pickled, a call of `function`."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("file", [INDEX, ".metadata"])
def test_nothing_in_it_runs(checkpoint, tmp_path, file):
    (checkpoint / file).write_bytes(pickle.dumps(Runs(os.mkdir, str(tmp_path / "ran"))))
    announced(checkpoint.rename(tmp_path / ".tmp-again"), tmp_path)  # checksums keep nobody from this
    assert manifest.newest_sound(tmp_path)[0]["next_step"] == 1
    if file == INDEX:
        with pytest.raises(TrainError, match="refused: it is damaged"):
            checkpoint_state.read_model(checkpoint)
    else:  # for torch's own tools
        assert torch.equal(checkpoint_state.read_model(checkpoint)["w"], TENSORS["model/w"])
    assert not (tmp_path / "ran").exists()


def place(**fields):
    """Where the tensor lies, other than it is."""
    return lambda tensor: tensor["pieces"][0].update(fields)


def resize(*shape, sizes=None):
    """Another shape of the tensor, and of its only piece."""

    def change(tensor):
        tensor["shape"] = shape
        tensor["pieces"][0]["sizes"] = sizes or tensor["pieces"][0]["sizes"]

    return change


A_PETABYTE = (1 << 24, 1 << 24)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tensor: tensor.update(shape="12x"), "it is damaged"),
        (lambda tensor: tensor.update(dtype="load"), "`load` is not an element type"),
        (place(file="../../etc/passwd"), "`../../etc/passwd` is not a tensor file"),
        (place(file="/etc/passwd"), "`/etc/passwd` is not a tensor file"),
        (place(file="__7_0.distcp"), "`__7_0.distcp` is not a tensor file of the checkpoint"),
        (place(begin=1 << 40), "`model/w` lies beyond the end of __0_0.distcp"),
        (place(begin=-1), "a piece lies outside its tensor"),
        (place(offsets=[1, 0]), "a piece lies outside its tensor"),
        (place(offsets=[0]), "it is damaged"),
        (resize(*A_PETABYTE, sizes=A_PETABYTE), "`model/w` is larger than what is stored of it"),
        (resize(300, 4), "the pieces of `model/w` do not cover it"),
        (resize(0, 1 << 70, sizes=(0, 1 << 70)), "a size is invalid"),
    ],
)
def test_what_it_says_is_checked_against_the_files(checkpoint, change, told):
    changed(checkpoint, change)
    with pytest.raises(TrainError, match=r"^the index of the checkpoint is refused: ") as caught:
        read_index(checkpoint)
    assert told in str(caught.value)
    assert str(checkpoint / INDEX) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"[" * 100_000, b'{"tensors": [[]]}', b'{"tensors": 1e999}'])
def test_a_damaged_one_is_one_error(checkpoint, content):
    (checkpoint / INDEX).write_bytes(content)
    with pytest.raises(TrainError, match=r"^the index of the checkpoint is refused: it is damaged"):
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
    assert manifest.newest_sound(checkpoint.parent) == (None, ["step-00000001: manifest.json does not list index.json"])


def test_a_pipe_in_place_of_a_file_is_not_waited_for(checkpoint):
    (checkpoint / "__0_0.distcp").unlink()
    os.mkfifo(checkpoint / "__0_0.distcp")
    assert manifest.newest_sound(checkpoint.parent) == (None, ["step-00000001: __0_0.distcp is not a regular file"])


def test_tensors_are_read_weights_only(checkpoint):
    """The bytes of a tensor are a pickle, too; torch's restricted unpickler reads it."""
    (where,) = read_index(checkpoint)["model/w"].pieces
    path = checkpoint / where.file
    raw, target = bytearray(path.read_bytes()), checkpoint.parent / "ran"
    torch.save(Runs(os.mkdir, str(target)), checkpoint.parent / "hostile")
    hostile = (checkpoint.parent / "hostile").read_bytes()
    assert len(hostile) <= where.num_bytes
    raw[where.begin : where.begin + len(hostile)] = hostile
    path.write_bytes(raw)

    def moved(tensor):
        tensor["pieces"][0]["num_bytes"] = len(hostile)

    changed(checkpoint, moved)
    with pytest.raises(TrainError, match="cannot read checkpoint"):
        checkpoint_state.read_model(checkpoint)
    assert not target.exists()


def test_a_compressed_tensor_is_not_unpacked(tmp_path):
    """Of zeros it may be a thousand times as large as its file."""
    write(tmp_path, {"model/w": torch.zeros(4)})
    torch.save(torch.zeros(1_000_000)[:4], tmp_path / "stored")
    with zipfile.ZipFile(tmp_path / "stored") as stored, zipfile.ZipFile(
        tmp_path / "__0_0.distcp", "w", zipfile.ZIP_DEFLATED
    ) as packed:  # fmt: skip
        for entry in stored.infolist():
            packed.writestr(entry.filename, stored.read(entry))
    changed(tmp_path, place(num_bytes=(tmp_path / "__0_0.distcp").stat().st_size))
    with pytest.raises(TrainError, match=r"cannot read checkpoint: rank 0: __0_0\.distcp is compressed"):
        checkpoint_state.read_model(tmp_path)
