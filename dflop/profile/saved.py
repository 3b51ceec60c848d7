"""Bytes that autograd keeps alive between forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def saved_bytes(forward: Callable[[], torch.Tensor], parameters: Iterable[torch.Tensor]) -> tuple[int, torch.Tensor]:
    """Bytes kept by one forward, each storage once, and the forward's result, whose graph is still alive.

    Views share a storage and count as a whole, because it cannot be freed before the last of them. Of a layer that is
    recomputed, its positional inputs are counted; what it shares with all layers (rotary tables, lengths) is not.

    Args:
        forward: Builds the graph.
        parameters: Tensors that are alive anyway and do not count.
    """
    own = {_identity(p) for p in parameters}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        identity = _identity(tensor)
        if identity not in own:
            storages[identity] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    kept = storages.values() if output.requires_grad else ()  # without a backward pass to come nothing is kept
    return sum(storage.nbytes() for storage in kept), output  # some have been let go of


def _identity(tensor: torch.Tensor) -> int:
    # Fake storages have no data pointer; the address of the storage object itself tells both kinds apart.
    return int(tensor.untyped_storage()._cdata)
