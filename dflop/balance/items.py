"""Encoder items of a global batch dealt over all ranks of a process group, and their rows returned to their owners.

Ranks exchange the sizes of their items, and each computes the same deal. One all-to-all sends the items to the ranks
that encode them, a second returns the rows, a third the gradients of the rows. The gradient is that of no dealing: an
encoder's gradient is a sum over items, and DDP and FSDP sum it over ranks. Frozen encoders need no third exchange. A
rank without items encodes zeros in the form of the cheapest item and sends no row, so that its weights are gathered
with those of the others (FSDP) and have gradients (DDP).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from dflop.errors import TrainError
from dflop.parallel.exchange import all_to_all
from dflop.schedule.data_parallel import balance_ranks
from dflop.schedule.items import Ints

Size = tuple[int, ...]
"""Size of an item as the encoder takes it next to the data, e.g. (frames, height, width) in patches; may be empty."""
Encode = Callable[[torch.Tensor, list[Size]], Sequence[torch.Tensor]]
"""(data of some items one after the other, their sizes) -> rows `[rows, width]` of each item."""
MIN_GAIN = 1.05


class Items(NamedTuple):
    """Encoder items of one kind on one rank."""

    data: torch.Tensor
    """`[parts, ...]` of all items one after the other: patches or tiles."""
    num_parts: list[int]
    """Number of parts of each item."""
    sizes: list[Size]
    costs: list[float]
    """In any unit that all ranks share."""


class _Known(NamedTuple):
    """What a rank tells the others of its items."""

    num_parts: list[int]
    sizes: list[Size]
    costs: list[float]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class DealtItems:
    """Who encodes which items of all ranks; the same on each of them."""

    home: Ints
    """`[items]` rank that an item's rows are for; ascending."""
    encoder: Ints
    """`[items]` rank that encodes it."""
    num_parts: Ints
    sizes: list[Size]
    cheapest: int
    shape: tuple[int, ...]
    """Shape of a part."""
    dtype: torch.dtype


class ItemDealer:
    """Deals encoder items; every rank of the group calls `meet`, then `encode` for each kind that `meet` returned.

    It creates its own process groups, so that its messages and the trainer's keep their order among themselves; all
    ranks of the job construct it together. `gain` says what dealing saves.

    Args:
        group: Ranks to deal over; None: all.
        min_gain: Items stay where they are if that takes less than this times as long as dealing them.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, min_gain: float = MIN_GAIN) -> None:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        backend = dist.get_backend(group)
        self._group: Any = dist.new_group(ranks, backend=backend)
        # Sizes travel through the host: a GPU is not waited for.
        self._host: Any = self._group if backend == "gloo" else dist.new_group(ranks, backend="gloo")
        self._rank, self._num_ranks = dist.get_rank(self._group), len(ranks)
        self._min_gain = min_gain
        self._slowest = np.zeros(2)

    @property
    def gain(self) -> float:
        """Costs of the slowest ranks of all steps so far, without dealing over with dealing; 1: nothing is gained."""
        before, after = self._slowest.tolist()
        return before / after if after else 1.0

    def close(self) -> None:
        """Give the process groups back; all ranks call it."""
        for group in {id(g): g for g in (self._group, self._host)}.values():
            dist.destroy_process_group(group)

    def meet(self, items: Mapping[str, Items | None]) -> dict[str, DealtItems]:
        """Deal the items of all ranks; of kinds that no rank has an item of, nothing is returned. Collective.

        Args:
            items: By kind, equal on all ranks; None: this rank has none.

        Raises:
            TrainError: the ranks name other kinds, or their items are of other forms.
        """
        own = {
            kind: of and _Known(of.num_parts, of.sizes, of.costs, tuple(of.data.shape[1:]), of.data.dtype)
            for kind, of in items.items()
        }
        every: list[dict[str, _Known | None]] = self._gather(own)
        if any(list(of) != list(own) for of in every):
            raise TrainError(f"ranks deal items of {[list(of) for of in every]}", hint="use the same kinds on all")
        by_kind = {kind: [of[kind] for of in every] for kind in own}
        return {
            kind: self._deal(kind, of) for kind, of in by_kind.items() if any(known and known.sizes for known in of)
        }

    def _deal(self, kind: str, every: Sequence[_Known | None]) -> DealtItems:
        given = [known for known in every if known]
        if len({known.shape for known in given}) > 1:
            raise TrainError(
                f"parts of `{kind}` items have shapes {sorted({known.shape for known in given})}",
                hint="pad them to one shape, e.g. with the processor's `do_pad`",
            )
        home = np.repeat(np.arange(self._num_ranks), [len(known.sizes) if known else 0 for known in every])
        costs = np.array([cost for known in given for cost in known.costs], dtype=np.float64)
        plan = balance_ranks(
            costs, np.ones(len(costs), dtype=np.int64), self._num_ranks, cap_tokens=len(costs), num_microbatches=1
        )
        before, after = (np.bincount(of, costs, self._num_ranks).max() for of in (home, plan.rank))
        encoder = plan.rank if before >= self._min_gain * after else home
        self._slowest += before, after if encoder is plan.rank else before
        return DealtItems(
            home, encoder, np.array([n for known in given for n in known.num_parts], dtype=np.int64),
            [size for known in given for size in known.sizes], int(costs.argmin()), given[0].shape, given[0].dtype,
        )  # fmt: skip

    def encode(
        self, dealt: DealtItems, items: Items | None, encode: Encode, device: torch.device
    ) -> list[torch.Tensor]:
        """Rows of this rank's items; collective, in the backward pass, too.

        Args:
            dealt: As `meet` returned.
            items: This rank's; None: it has none.
            encode: Runs the encoder; called once.
            device: Of the rows.

        Returns:
            `[rows, width]` per item. A rank without items gets one tensor without rows, which must become part of its
            loss (`loss + rows.sum()`), or the others wait for it in their backward pass.
        """
        (mine,) = np.nonzero(dealt.home == self._rank)
        (given,) = np.nonzero(dealt.encoder == self._rank)
        is_moved = bool((dealt.home != dealt.encoder).any())
        out = mine[np.argsort(dealt.encoder[mine], kind="stable")]  # in the order in which they are sent, and come back
        own = torch.zeros((0, *dealt.shape), dtype=dealt.dtype, device=device) if items is None else items.data
        data = self._moved(dealt, own, mine, out) if is_moved else own
        if len(given):
            rows = list(encode(data, [dealt.sizes[i] for i in given]))
        else:
            zeros = own.new_zeros((int(dealt.num_parts[dealt.cheapest]), *dealt.shape))
            rows = [encode(zeros, [dealt.sizes[dealt.cheapest]])[0][:0]]
        if not is_moved:
            return rows
        num_rows = np.zeros(len(dealt.home), dtype=np.int64)
        counts: list[list[int]] = self._gather([len(of) for of in rows] if len(given) else [])
        num_rows[np.argsort(dealt.encoder, kind="stable")] = [*chain.from_iterable(counts)]
        sent, received = self._per_rank(num_rows, (dealt.home, given), (dealt.encoder, mine))
        found = all_to_all(torch.cat(rows), sent, received, self._group)
        parts = found.split(num_rows[out].tolist()) if len(out) else (found,)
        return [parts[place] for place in np.argsort(out)] if len(out) else [found]

    def _moved(self, dealt: DealtItems, own: torch.Tensor, mine: Ints, out: Ints) -> torch.Tensor:
        """Data of the items that this rank encodes."""
        if len(mine):
            parts = own.split(dealt.num_parts[mine].tolist())
            own = torch.cat([parts[place] for place in out - mine[0]])
        (given,) = np.nonzero(dealt.encoder == self._rank)
        sent, received = self._per_rank(dealt.num_parts, (dealt.encoder, mine), (dealt.home, given))
        return all_to_all(own, sent, received, self._group)

    def _per_rank(self, counts: Ints, *of: tuple[Ints, Ints]) -> Iterator[list[int]]:
        """Sums of some items' counts by rank, for each (rank of every item, which items)."""
        for ranks, which in of:
            yield np.bincount(ranks[which], counts[which], self._num_ranks).astype(int).tolist()

    def _gather(self, value: Any) -> list[Any]:
        every: list[Any] = [None] * self._num_ranks
        dist.all_gather_object(every, value, group=self._host)
        return every
