"""Layers whose saved tensors wait on the host: copied out while later layers compute, back while these run backward.

What a layer makes for itself goes; its weights stay, and so does what it shares with others, such as cosines and sines.
On a GPU copies have streams of their own, so that no kernel waits for one that it does not read, and a layer's copies
begin to come back when the layer behind it begins its backward pass.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

LEAST_BYTES = 256 << 10
"""Least bytes of a tensor that goes: a smaller one is copied before its copy is launched."""


def spread(num_layers: int, num_sent: int) -> list[int]:
    """Which layers of a stage send their tensors: spread evenly, so that few copies wait at a time.

    Rather the first layers than the last, which run backward at once.
    """
    return [layer for layer in range(num_layers) if layer * num_sent % num_layers < num_sent]


class Offload:
    """What layers of one stage have on the host."""

    def __init__(self) -> None:
        self._last: weakref.ref[_LayerPass] | None = None

    def run(self, layer: nn.Module, place: int, forward: Callable[..., Any], *args: Any) -> Any:
        """What `forward` returns, which is the layer's with its keywords bound; its first argument is its own."""
        last = self._last() if self._last is not None else None
        # A layer no further in than the last one begins another microbatch.
        current = _LayerPass(place, last if last is not None and last.place < place else None)
        self._last = weakref.ref(current)
        given = tree_leaves([args[1:], getattr(forward, "keywords", {})])

        def pack(tensor: torch.Tensor) -> torch.Tensor | _Copy:
            stays = (t for t in (*layer.parameters(), *given) if isinstance(t, torch.Tensor))
            storage = StorageWeakRef(tensor.untyped_storage())
            if tensor.nbytes < LEAST_BYTES or storage.cdata in {t.untyped_storage()._cdata for t in stays}:
                return tensor
            return current.copy_of(tensor, storage)

        with saved_tensors_hooks(pack, _unpack):
            out = forward(*args)
        current.known.clear()
        return out


class _LayerPass:
    """A forward pass of one layer; each of its copies keeps it alive."""

    def __init__(self, place: int, before: _LayerPass | None) -> None:
        self.place, self.before = place, before
        self.known: dict[tuple[Any, ...], tuple[_Copy, StorageWeakRef]] = {}
        """Until the pass ends; the references see to it that no new storage gets the number of one that is gone."""
        self._copies: weakref.WeakSet[_Copy] = weakref.WeakSet()

    def copy_of(self, tensor: torch.Tensor, storage: StorageWeakRef) -> _Copy:
        """One for all who save the same tensor."""
        key = (storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key not in self.known:
            self.known[key] = _Copy(tensor, self), storage
            self._copies.add(self.known[key][0])
        return self.known[key][0]

    def fetch(self) -> None:
        """Begin to bring all of it back."""
        for copy in self._copies:
            copy.fetch()


class _Copy:
    """A saved tensor on the host; gone with the last node of the graph that needs it."""

    def __init__(self, tensor: torch.Tensor, of: _LayerPass) -> None:
        self.of, self._device = of, tensor.device
        self._host = host_like(tensor)
        self._here: torch.Tensor | None = None
        self._out, self._back = _lanes(tensor.device)
        self._is_out = _copy(tensor, self._host, self._out)

    def fetch(self) -> None:
        """Begin to bring it back."""
        if self._here is None:
            with _on(self._back):  # whose memory it gets
                here = self._here = torch.empty_like(self._host, device=self._device)
            self._is_back = _copy(self._host, here, self._back, self._is_out)

    def here(self) -> torch.Tensor:
        """It, on the device; kernels that follow wait for it."""
        self.fetch()
        assert self._here is not None
        if self._is_back is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._is_back)
            self._here.record_stream(stream)
        return self._here


def _unpack(packed: torch.Tensor | _Copy) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    packed.of.fetch()
    if packed.of.before is not None:
        packed.of.before.fetch()
    return packed.here()


def host_like(tensor: torch.Tensor) -> torch.Tensor:
    """Room on the host, page-locked where it is for a GPU."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def both_ways(num_bytes: int, device: torch.device) -> Callable[[], None]:
    """Begins a copy of so many bytes to the host and one of as many back, as layers do at once."""
    sent, fetched = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    on_host = host_like(sent), host_like(fetched)
    out, back = _lanes(device)

    def begin() -> None:
        _copy(sent, on_host[0], out)
        _copy(on_host[1], fetched, back)

    return begin


@functools.cache
def _lanes(device: torch.device) -> tuple[torch.cuda.Stream | None, torch.cuda.Stream | None]:
    """Streams for copies to the host and back."""
    if device.type != "cuda":
        return None, None
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _on(lane: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if lane is None else torch.cuda.stream(lane)


def _copy(
    source: torch.Tensor, target: torch.Tensor, lane: torch.cuda.Stream | None, after: torch.cuda.Event | None = None
) -> torch.cuda.Event | None:
    """Copy, on a stream behind an event or all that the present one has to do; the event of its end."""
    if lane is None:
        target.copy_(source)
        return None
    lane.wait_event(after or torch.cuda.current_stream(lane.device).record_event())
    with _on(lane):
        target.copy_(source, non_blocking=True)
    if source.is_cuda:
        source.record_stream(lane)
    event: torch.cuda.Event = lane.record_event()
    return event
