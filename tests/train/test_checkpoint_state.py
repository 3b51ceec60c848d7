from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from dflop.train.blocks import blocks_of
from dflop.train.checkpoint_state import copy_to_host, host_memory

MIB = 2**20
TENSORS = {
    "just over a power of two": torch.arange(MIB + 1, dtype=torch.float32),
    "a count of steps": torch.tensor(7.0),
    "odd": torch.arange(21, dtype=torch.bfloat16).view(3, 7),
    "no rows": torch.zeros(0, 5),
    "bytes": torch.arange(5, dtype=torch.uint8),
}
BLOCKS = [block for name, tensor in TENSORS.items() for block in blocks_of(name, tensor, None)]


def test_host_memory_is_one_piece_of_the_size_of_the_state_and_its_parts_are_written_without_a_copy():
    memory = host_memory(BLOCKS)
    copies = copy_to_host(BLOCKS, memory)
    assert [copy.id for copy in copies] == [block.id for block in BLOCKS]
    assert all(torch.equal(copy.tensor, block.tensor) for copy, block in zip(copies, BLOCKS, strict=True))
    assert all(copy.tensor.untyped_storage().size() == copy.tensor.nbytes for copy in copies)
    begins = [copy.tensor.data_ptr() for copy in copies if copy.tensor.numel()]
    assert max(begins) + 64 - min(begins) <= sum(block.tensor.nbytes + 64 for block in BLOCKS)


@pytest.mark.parametrize("error", [0, 801])
def test_as_much_is_page_locked_as_the_state_takes_and_it_is_released(monkeypatch, capsys, error):
    """No CUDA: what it would be asked for."""
    locked, released = [], []
    cuda = SimpleNamespace(
        cudaHostRegister=lambda address, num_bytes, flags: locked.append((address, num_bytes)) or error,
        cudaHostUnregister=released.append,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    blocks = [
        SimpleNamespace(id=block.id, tensor=SimpleNamespace(
            is_cuda=True, nbytes=block.tensor.nbytes, dtype=block.tensor.dtype, shape=block.tensor.shape
        ))
        for block in BLOCKS
    ]  # fmt: skip
    memory = host_memory(blocks)
    ((address, num_bytes),) = locked
    assert address == memory[BLOCKS[0].id].data_ptr()
    assert 0 <= num_bytes - sum(block.tensor.nbytes for block in BLOCKS) < 64 * len(BLOCKS)
    assert ("CUDA error 801" in capsys.readouterr().err) == bool(error)
    assert not released
    del memory
    gc.collect()
    assert released == ([] if error else [address])
