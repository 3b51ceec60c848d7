"""What the ranks of a context-parallel group encode of a microbatch, as sizes and exchanges that an encoder takes.

Ranges of items are those of `dflop/simulate/pieces.py`. Where a module has `merge_tokens` they count runs of tokens,
and ranks may have parts of one frame: the encoder is then given whole items' sizes with the parts here, and in every
layer ranks exchange the keys and values of frames that they share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dflop.models.family import Family
from dflop.records import MediaItem
from dflop.simulate.pieces import FramePart, TileRange, frame_parts, num_parts, owned
from dflop.train.context import FeatureExchange, FrameExchange, feature_exchange, frame_exchange

Part = tuple[int, int, int]
"""(index of an item, first token, end), within a frame."""


@dataclass(frozen=True, slots=True)
class EncoderShare:
    """One module's items in one microbatch, as one rank of the group sees them."""

    of_ranks: tuple[tuple[TileRange, ...], ...]
    cp_rank: int
    merge_tokens: int
    """As `ModulePlan.merge_tokens`."""
    family: Family
    media: Callable[[int], MediaItem]
    """By id of an item."""

    @property
    def ranges(self) -> tuple[TileRange, ...]:
        """What this rank encodes, in packed order."""
        return self.of_ranks[self.cp_rank]

    @property
    def items(self) -> tuple[int, ...]:
        """Items that the rank hands on."""
        return owned(self.ranges)

    def features(self) -> FeatureExchange | None:
        """How what ranks make of parts of an item comes together; None on all where every item is whole on one."""
        return feature_exchange(self.of_ranks, self.cp_rank, self._num_features, self.sizes(self.items))

    def frames(self, filler: MediaItem | None = None) -> FrameExchange | None:
        """What ranks with parts of one frame exchange in every layer; None on all where every frame is whole on one.

        Args:
            filler: What this rank encodes if it has no range; None: nothing, as where it has one.
        """
        if not self.merge_tokens:
            return None
        parts: list[Sequence[FramePart]] = [
            frame_parts(of, self.merge_tokens, self._frame_tokens) for of in self.of_ranks
        ]
        if filler is not None:
            parts[self.cp_rank] = [
                FramePart(-1, frame, first, end) for frame, (_, first, end) in enumerate(whole_frames(filler))
            ]
        return frame_exchange(parts, self.cp_rank)

    def sizes(self, items: Sequence[int]) -> torch.Tensor:
        """int64 `[items, n]`: `Family.item_size` of each."""
        return torch.tensor([self.family.item_size(self.media(item)) for item in items])

    def sizes_and_parts(self) -> tuple[torch.Tensor, list[Part]]:
        """What the encoder works from: sizes of ranges as if each were an item, or whole items' with their parts."""
        if self.merge_tokens:
            items = list(dict.fromkeys(r.item for r in self.ranges))
            parts = frame_parts(self.ranges, self.merge_tokens, self._frame_tokens)
            starts = ((items.index(p.item), p.frame * self._frame_tokens(p.item), p) for p in parts)
            return self.sizes(items), [(n, start + p.first, start + p.end) for n, start, p in starts]
        return torch.tensor([self._range_size(r) for r in self.ranges]), []

    def _num_features(self, of: TileRange) -> int:
        media = self.media(of.item)
        return self.family.num_features(media) // num_parts(media, self.merge_tokens) * (of.end - of.first)

    def _frame_tokens(self, item: int) -> int:
        media = self.media(item)
        return media.num_tokens // num_parts(media)

    def _range_size(self, of: TileRange) -> tuple[int, ...]:
        """`Family.item_size` of some tiles or frames of an item."""
        media = self.media(of.item)
        whole = self.family.item_size(media)
        return whole if num_parts(media) == 1 else (of.end - of.first, *whole[1:])


def whole_frames(media: MediaItem) -> list[Part]:
    """The frames of an item that is packed alone."""
    each = media.num_tokens // num_parts(media)
    return [(0, start, start + each) for start in range(0, media.num_tokens, each)]
