"""What context-parallel ranks give one another in a microbatch, worked out by each for itself.

The samples of a group lie in a line of tokens, of which each rank has a range (`dflop/simulate/pieces.py`). So a rank
needs keys and values of others for its first sample only, in front of its own, and others need at most those of its
last sample. Layers with a state per head have these samples whole on every rank, in a part of the heads. In an encoder
ranks with parts of one frame give one another the keys and values of these parts. Rows go from whoever has the first
part of an item to the ranks with its placeholders.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import numpy as np
import torch
import torch.distributed as dist

from dflop.models.attention import ByHeads, Earlier, FrameKeys
from dflop.models.build import Gathered
from dflop.parallel.exchange import all_to_all, all_to_alls, exchanged
from dflop.simulate.pieces import FramePart, Piece, TileRange, owned


@dataclass(frozen=True, slots=True)
class KeyExchange:
    """What one rank of a group gives and takes of samples that are on several, in every layer of the LLM."""

    rank: int
    """This one, in the group."""
    sent: tuple[int, ...]
    """Per rank, how many of the last tokens here it has to know: all of the last sample here, or none."""
    received: tuple[int, ...]
    """Per rank, how many tokens it has of the first sample here that come before this rank's."""
    between: tuple[int, ...]
    """Per rank, how many tokens of the same sample ranks between this one and it have."""
    shared: tuple[tuple[int, int], ...]
    """Per rank, tokens of the first sample there and, if it is another one, of the last, where others have of these."""
    lengths: tuple[int, ...]
    """Tokens of every sample that several ranks have, in the order of the line."""

    def through(self, group: dist.ProcessGroup) -> Earlier:
        """The exchange as layers call it."""
        return Earlier(
            max(self.sent), sum(self.received), lambda given: self._run(given, group),
            lambda own, most: self.limited(most)._run(own, group), self._by_heads(group),
        )  # fmt: skip

    def limited(self, most: int) -> KeyExchange:
        """The same of no more than so many of the tokens in front of a rank's own."""
        nearer = [*accumulate(reversed(self.received), initial=0)][-2::-1]
        return replace(
            self,
            sent=tuple(max(0, min(num, most - n)) for num, n in zip(self.sent, self.between, strict=True)),
            received=tuple(max(0, min(num, most - n)) for num, n in zip(self.received, nearer, strict=True)),
        )

    def _run(self, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        copies = [own[len(own) - num :] for num in self.sent if num]
        given = torch.cat(copies) if len(copies) > 1 else copies[0] if copies else own[:0]
        return all_to_all(given, self.sent, self.received, group)

    def _by_heads(self, group: dist.ProcessGroup) -> ByHeads:
        nums, num_ranks = [sum(of) for of in self.shared], len(self.shared)
        mine = [nums[self.rank]] * num_ranks

        def to_heads(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            given = (x.unflatten(1, (num_ranks, -1)).transpose(0, 1).flatten(0, 1) for x in tensors)
            return all_to_alls(tuple(given), mine, nums, group)

        def to_tokens(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            taken = all_to_alls(tensors, nums, mine, group)
            return tuple(x.unflatten(0, (num_ranks, mine[0])).transpose(0, 1).flatten(1, 2) for x in taken)

        return ByHeads(*self.shared[self.rank], list(self.lengths), num_ranks, to_heads, to_tokens)


@dataclass(frozen=True, slots=True)
class RowExchange:
    """Rows of one encoder, or features of its tiles, that one rank of a group gives and takes."""

    rows: torch.Tensor
    """int64: of what is made here, those for the first rank first; all, or none where this rank encodes nothing."""
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @classmethod
    def of(cls, targets: np.ndarray, received: Iterable[int]) -> RowExchange:
        """The exchange of a rank whose rows go to `targets`, and that takes so many from each rank."""
        received = tuple(received)
        sent = np.bincount(targets, minlength=len(received)).tolist()
        return cls(torch.from_numpy(np.argsort(targets, kind="stable")), tuple(sent), received)

    def run(self, made: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """What this rank takes, by rank; collective."""
        given = made.index_select(0, self.rows.to(made.device, non_blocking=True))
        return all_to_all(given, self.sent, self.received, group)


@dataclass(frozen=True, slots=True)
class FeatureExchange:
    """How the features of an encoder's tiles come to the ranks that have an item's first tile."""

    tiles: RowExchange
    order: torch.Tensor
    """int64: of the features received, in the order of the items that are handed on here, and of their tiles."""
    sizes: torch.Tensor
    """int64 `[items, n]` of these items; stays on the host."""

    def through(self, group: dist.ProcessGroup) -> Gathered:
        """The exchange as a stage calls it."""

        def exchange(features: torch.Tensor) -> torch.Tensor:
            taken = self.tiles.run(features, group)
            return taken.index_select(0, self.order.to(features.device, non_blocking=True))

        return Gathered(exchange, self.sizes)


def feature_exchange(
    ranges: Sequence[Sequence[TileRange]], cp_rank: int, num_features: Callable[[TileRange], int], sizes: torch.Tensor
) -> FeatureExchange | None:
    """How the features of dealt tiles come together; None on all ranks where every item is whole on one.

    Args:
        ranges: Per rank what it encodes, in packed order.
        cp_rank: This rank.
        num_features: Of a range of tiles.
        sizes: Of the items that this rank hands on, in packed order.
    """
    owner = {r.item: rank for rank, of in enumerate(ranges) for r in of if not r.first}
    if all(owner[r.item] == rank for rank, of in enumerate(ranges) for r in of):
        return None
    place = {item: n for n, item in enumerate(owned(ranges[cp_rank]))}
    to = [np.full(num_features(r), owner[r.item]) for r in ranges[cp_rank]]
    target = np.concatenate([np.zeros(0, dtype=np.int64), *to])
    taken = [[r for r in of if owner[r.item] == cp_rank] for of in ranges]
    came = [r for of in taken for r in of]
    lengths = [num_features(r) for r in came]
    rows = torch.arange(sum(lengths)).split(lengths)
    order = sorted(range(len(came)), key=lambda n: (place[came[n].item], came[n].first))
    tiles = RowExchange.of(target, (sum(map(num_features, of)) for of in taken))
    return FeatureExchange(tiles, torch.cat([torch.zeros(0, dtype=torch.int64), *(rows[n] for n in order)]), sizes)


@dataclass(frozen=True, slots=True)
class FrameExchange:
    """Keys and values of parts of frames that one rank of a group gives and takes in every layer of an encoder."""

    rows: torch.Tensor
    """int64: of the tokens here those for the first rank, then those for the second, and so on."""
    sent: tuple[int, ...]
    received: tuple[int, ...]
    order: torch.Tensor
    """int64: indices into own tokens and received ones behind them, each once; they order the frames of all parts."""
    bounds: torch.Tensor
    """int32 `[parts + 1]`: where these frames begin and end."""

    def through(self, group: dist.ProcessGroup, device: torch.device) -> FrameKeys:
        """The exchange as attention calls it."""
        rows, order, back, bounds = (
            x.to(device, non_blocking=True) for x in (self.rows, self.order, self.order.argsort(), self.bounds)
        )

        def exchange(own: torch.Tensor) -> torch.Tensor:
            # One expression: a name would keep the received rows in memory next to the joined ones.
            return exchanged(
                torch.cat([own, all_to_all(own.index_select(0, rows), self.sent, self.received, group)]),
                lambda found: found.index_select(0, order),
                lambda grad: grad.index_select(0, back),
            )

        return FrameKeys(bounds, int((self.bounds[1:] - self.bounds[:-1]).max()), exchange)


def frame_exchange(parts: Sequence[Sequence[FramePart]], cp_rank: int) -> FrameExchange | None:
    """What ranks exchange of frames that they share; None on all of them where every frame is on one.

    Args:
        parts: Per rank what it has, in packed order.
        cp_rank: This rank, which has some.
    """
    holders: dict[tuple[int, int], set[int]] = defaultdict(set)
    for rank, of in enumerate(parts):
        for part in of:
            holders[part.item, part.frame].add(rank)
    if all(len(ranks) == 1 for ranks in holders.values()):
        return None
    own = parts[cp_rank]
    mine = {(part.item, part.frame) for part in own}
    rows = list(torch.arange(sum(_length(p) for p in own)).split([_length(p) for p in own]))
    given = [
        [n for part, n in zip(own, rows, strict=True) if rank in holders[part.item, part.frame]]
        for rank in range(len(parts))
    ]
    given[cp_rank] = []
    taken = [[p for p in of if (p.item, p.frame) in mine] if rank != cp_rank else [] for rank, of in enumerate(parts)]
    come = [part for of in taken for part in of]
    start = sum(map(_length, own))
    places = dict(zip(own, rows, strict=True))
    places |= zip(come, (torch.arange(sum(map(_length, come))) + start).split(list(map(_length, come))), strict=True)
    whole: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
    for part in sorted(places):
        whole[part.item, part.frame].append(places[part])
    frames = [torch.cat(whole[part.item, part.frame]) for part in own]
    return FrameExchange(
        torch.cat([torch.zeros(0, dtype=torch.int64), *chain(*given)]),
        tuple(sum(map(len, of)) for of in given), tuple(sum(map(_length, of)) for of in taken), torch.cat(frames),
        torch.tensor([0, *map(len, frames)]).cumsum(0).to(torch.int32),
    )  # fmt: skip


def _length(part: FramePart) -> int:
    return part.end - part.first


class Line:
    """The samples of a group's microbatch behind one another, as one of its ranks sees them.

    Args:
        pieces: Per rank what it has, in order.
        cp_rank: This rank.
    """

    def __init__(self, pieces: Sequence[Sequence[Piece]], cp_rank: int) -> None:
        self._pieces, self._cp_rank = pieces, cp_rank
        self._ends = list(accumulate(sum(p.end - p.first for p in of) for of in pieces))
        self._lengths = {p.sample: p.end for of in pieces for p in of}
        self._starts = dict(zip(self._lengths, accumulate(self._lengths.values(), initial=0), strict=False))

    @property
    def own(self) -> Sequence[Piece]:
        """What this rank has."""
        return self._pieces[self._cp_rank]

    @property
    def num_tokens(self) -> int:
        """Tokens of all ranks."""
        return self._ends[-1]

    @property
    def keys(self) -> KeyExchange | None:
        """None where no sample is on two ranks, so that no rank of the group exchanges anything."""
        if not any(p.first for of in self._pieces for p in of):
            return None
        me, ranks = self._cp_rank, range(len(self._pieces))
        holders = Counter(p.sample for of in self._pieces for p in of)
        ends = [(of[:1], of[1:][-1:]) for of in self._pieces]
        return KeyExchange(
            rank=me,
            sent=tuple(self._needed(me, rank) for rank in ranks),
            received=tuple(self._needed(rank, me) for rank in ranks),
            between=tuple(sum(self._needed(other, rank) for other in range(me + 1, rank)) for rank in ranks),
            shared=tuple(
                (
                    sum(p.end - p.first for p in first if holders[p.sample] > 1),
                    sum(p.end - p.first for p in last if holders[p.sample] > 1),
                )
                for first, last in ends
            ),
            lengths=tuple(length for sample, length in self._lengths.items() if holders[sample] > 1),
        )

    def _needed(self, source: int, target: int) -> int:
        """Tokens of one rank that later ones on another attend to."""
        if source >= target or not self._pieces[source] or not self._pieces[target]:
            return 0
        last = self._pieces[source][-1]
        return last.end - last.first if last.sample == self._pieces[target][0].sample else 0

    def rows(self, encoded: Sequence[Sequence[tuple[int, np.ndarray]]]) -> tuple[torch.Tensor, RowExchange]:
        """Where rows of an encoder belong in this rank's tokens, as they come, and how they come.

        Args:
            encoded: Per rank, of each item that it encodes, in packed order, the sample and its placeholders' positions
                in it. Of other ranks those of samples that this rank has none of may be missing.
        """
        low, nothing = ([0, *self._ends])[self._cp_rank], np.zeros(0, dtype=np.int64)
        places = [np.concatenate([nothing, *(self._starts[s] + where for s, where in of)]) for of in encoded]
        holders = [np.searchsorted(self._ends, place, side="right") for place in places]
        here = [place[holder == self._cp_rank] - low for place, holder in zip(places, holders, strict=True)]
        return torch.from_numpy(np.concatenate(here)), RowExchange.of(holders[self._cp_rank], map(len, here))
