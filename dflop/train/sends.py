"""Sends under way, and the tensors they read: each must outlive its send, and no longer than that.

gloo says of a send that it is over only to somebody who waits for it, so polling frees nothing. What shows that a
tensor has arrived is what its receiver does next: its gradient comes back, or a later microbatch comes from there,
behind the backward that needed it. Waiting then takes no time, and no more is held than is in flight.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

from dflop.parallel.topology import Peers


class Sends:
    """The sends of one step and one direction."""

    def __init__(self) -> None:
        self._held: dict[Peers, deque[tuple[int, dist.Work, torch.Tensor]]] = {}

    def send(self, tensor: torch.Tensor, peers: Peers, microbatch: int, *, group: dist.ProcessGroup, tag: int) -> None:
        """Begin to send a tensor of a microbatch to everyone who takes it from this rank."""
        tensor, held = tensor.contiguous(), self._held.setdefault(peers, deque())
        for peer in peers.gives_to:
            work = dist.isend(tensor, peer, group=group, tag=tag)
            assert work is not None, "this rank is in the group"
            held.append((microbatch, work, tensor))

    def settle(self, peers: Peers, last: int) -> None:
        """Wait for what went to these peers of microbatches up to `last`, and let go of it."""
        held = self._held.get(peers)
        while held and held[0][0] <= last:
            held.popleft()[1].wait()

    def settle_all(self) -> None:
        """Wait for everything that is left."""
        for peers, held in self._held.items():
            if held:
                self.settle(peers, held[-1][0])
