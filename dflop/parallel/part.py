"""Which part of a parameter a rank holds: the cut itself, and what a checkpoint must know of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Part:
    """Ranges of a parameter along one axis; the rank holds them one behind the other."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    axis: int
    ranges: tuple[tuple[int, int], ...]
    """`[first, end)` in the whole; one per fused matrix."""
    rows: tuple[int, int] | None = None
    """`[first, end)` along the first axis of what the ranges make up; None: all of it."""

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """A copy of the part; a view would keep the storage of the whole alive."""
        cut = torch.cat([whole.narrow(self.axis, first, end - first) for first, end in self.ranges], self.axis)
        return cut if self.rows is None else cut[slice(*self.rows)].clone()

    def pieces(self, part: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Rectangles of the whole that the part is made of: where each begins in the whole, and a view of it.

        Args:
            part: What `of` returned, or anything of its shape.
        """
        first_row, end_row = self.rows or (0, sum(end - first for first, end in self.ranges) if self.axis == 0 else 0)
        at = 0
        for first, end in self.ranges:
            start, length = [first_row if axis == 0 else 0 for axis in range(part.dim())], end - first
            low, high = (max(at, first_row), min(at + length, end_row)) if self.axis == 0 else (at, at + length)
            if low < high:
                start[self.axis] = first + low - at
                yield tuple(start), part.narrow(self.axis, low - first_row * (self.axis == 0), high - low)
            at += length


def rows_part(shape: tuple[int, ...], rows: tuple[int, int], cut: Part | None) -> Part:
    """Rows of a parameter, or of what tensor parallelism has left of it.

    Args:
        shape: Of the whole.
        rows: `[first, end)` of what the rank would hold.
        cut: That part; None: the whole.
    """
    return Part(shape, 0, (rows,)) if cut is None else replace(cut, rows=rows)


def even_rows(num_rows: int, num_shares: int, number: int) -> tuple[int, int]:
    """`[first, end)` of a share: as many rows for everyone, what is missing is missing at the end, as in FSDP2."""
    each = -(-num_rows // num_shares)
    first = min(number * each, num_rows)
    return first, min(first + each, num_rows)


def even_part(shape: torch.Size, axis: int, num_matrices: int, rank: int, degree: int) -> Part:
    """The share of `rank` in each of `num_matrices` that are fused along `axis`, all of one size.

    Args:
        shape: Of the whole; its length along `axis` is a multiple of `num_matrices * degree`.
        axis: Along which it is cut.
        num_matrices: 1 unless matrices are fused.
        rank: Of `degree` ranks.
        degree: Of tensor parallelism.
    """
    length = shape[axis] // num_matrices
    each = length // degree
    starts = [matrix * length + rank * each for matrix in range(num_matrices)]
    return Part(tuple(shape), axis, tuple((start, start + each) for start in starts))
