"""Collectives over many tensors at once: side by side in flat buffers, so that latency is paid once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

BUCKET_BYTES = 256 << 20
"""Of a flat buffer, which is memory on top of the tensors; far beyond the size at which latency matters."""


def run_flat(tensors: Sequence[torch.Tensor], collective: Callable[[torch.Tensor], object]) -> None:
    """Run a collective on copies of tensors in flat buffers, and copy its results back.

    Args:
        tensors: Equal in order, shapes and types on every rank.
        collective: Changes a one-dimensional tensor in place.
    """
    with torch.no_grad():
        for bucket in _buckets(tensors):
            flat = torch.cat([t.reshape(-1) for t in bucket])
            collective(flat)
            for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one type, as many as fit; a larger tensor has a bucket of its own."""
    bucket: list[torch.Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or num_bytes + tensor.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(tensor)
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket
