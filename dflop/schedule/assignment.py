"""Who owns what in one step, as arrays: quick to change and to add up. Owners as tuples are made once, at the end.

A sample has a slot (microbatch) and a data-parallel rank of the LLM; a media item has its sample's slot and a rank of
its encoder. In a colocated plan items are where their sample is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dflop.cost.model import Floats
from dflop.records import LLM, Plan, StepPlan
from dflop.schedule.items import Ints, ModuleItems, Owner, owner_cells
from dflop.simulate.jit import kernel


@dataclass(frozen=True, slots=True)
class Assignment:
    """Slot and rank of every sample and item of a global batch."""

    slot: Ints
    """`[samples]`."""
    rank: Ints
    """`[samples]`, of the LLM."""
    item_rank: Mapping[str, Ints]
    """Per encoder `[items]`."""

    def places(self, items: ModuleItems) -> tuple[Ints, Ints]:
        """(slot, rank) of every item of a module."""
        if items.module == LLM:
            return self.slot, self.rank
        return self.slot[items.sample_of], self.item_rank[items.module]

    def cells(self, items: ModuleItems, dp: int) -> Ints:
        """`slot * dp + rank` of every item of a module with so many data-parallel ranks."""
        slot, rank = self.places(items)
        return slot * dp + rank

    def owners(self, plan: Plan, items: Mapping[str, ModuleItems]) -> dict[str, Owner]:
        """`owner[microbatch][dp_rank]` of every module, items ascending, in the order of the plan's modules."""
        found: dict[str, Owner] = {}
        for m in plan.modules:
            cells: list[list[list[int]]] = [[[] for _ in range(m.parallel.dp)] for _ in range(plan.num_microbatches)]
            for item, (slot, rank) in enumerate(zip(*(x.tolist() for x in self.places(items[m.module])), strict=True)):
                cells[slot][rank].append(item)
            found[m.module] = tuple(tuple(tuple(ids) for ids in ranks) for ranks in cells)
        return found


def assignment_of(plan: Plan, step_plan: StepPlan) -> Assignment:
    """Where a step plan has everything; inverse of `Assignment.owners`."""
    cells = {w.module: owner_cells(w.owner, len(w.item_sample)) for w in step_plan.work}
    num_ranks = plan.module(LLM).parallel.dp
    return Assignment(
        cells[LLM] // num_ranks,
        cells[LLM] % num_ranks,
        {e.module: cells[e.module] % e.parallel.dp for e in plan.encoders},
    )


def in_sequence(order: Ints, plan: Plan) -> tuple[Ints, Ints]:
    """(slot, rank) of samples cut in a given order into buckets of equal count, one slot after the other.

    A short batch leaves the last buckets empty.
    """
    num_ranks = plan.module(LLM).parallel.dp
    bucket = np.empty(len(order), dtype=np.int64)
    bucket[order] = np.repeat(*_even_parts(len(order), plan.num_microbatches * num_ranks))
    return bucket // num_ranks, bucket % num_ranks


def even_item_ranks(items: ModuleItems, slot: Ints, num_slots: int, num_ranks: int) -> Ints:
    """Encoder rank of every item when each slot's items are cut by equal count, in arrival order."""
    item_slot = slot[items.sample_of]
    rank = np.empty(len(item_slot), dtype=np.int64)
    for k in range(num_slots):
        inside = np.flatnonzero(item_slot == k)
        rank[inside] = np.repeat(*_even_parts(len(inside), num_ranks))
    return rank


def _even_parts(num_items: int, num_parts: int) -> tuple[Ints, Ints]:
    """(part, its size) of parts that differ by at most one, larger ones first."""
    size, extra = divmod(num_items, num_parts)
    return np.arange(num_parts), size + (np.arange(num_parts) < extra)


def split_items(
    slot: Ints, weights: Floats, num_slots: int, num_ranks: int, slowness: Floats | None = None
) -> Ints:  # fmt: skip
    """Encoder rank of every item: within its slot, heaviest first to the rank that ends first.

    Within 4/3 of the best split over equal ranks. What all ranks would need for an item is left out of the comparison:
    then equal ranks compare nothing but loads.
    """
    rank = np.zeros(len(slot), dtype=np.int64)
    slow = np.ones(num_ranks) if slowness is None else slowness
    if num_ranks > 1:
        _split(slot, weights, np.argsort(-weights, kind="stable"), np.zeros((num_slots, num_ranks)), slow, rank)
    return rank


def split_under_cap(
    slot: Ints,
    seconds: Floats,
    num_tokens: Ints,
    num_slots: int,
    num_ranks: int,
    slowness: Floats | None = None,
    *,
    cap_tokens: int | None,
) -> Ints:
    """Encoder rank of every item, by seconds; by tokens in the slots in which that would break the cap on a rank's."""
    rank = split_items(slot, seconds, num_slots, num_ranks, slowness)
    if cap_tokens is None:
        return rank
    total = np.bincount(slot * num_ranks + rank, num_tokens, num_slots * num_ranks).reshape(num_slots, num_ranks)
    is_over = (total.max(axis=1) > cap_tokens)[slot]
    if is_over.any():
        by_tokens = split_items(slot, num_tokens.astype(float), num_slots, num_ranks)
        rank = np.where(is_over, by_tokens, rank)
    return rank


@kernel
def _split(slot, weights, order, loads, slowness, rank):  # type: ignore[no-untyped-def]  # numba infers them
    more = slowness - slowness.min()
    for i in order:
        mine = loads[slot[i]]
        best = 0
        for r in range(1, len(mine)):
            if mine[r] + weights[i] * more[r] < mine[best] + weights[i] * more[best]:
                best = r
        rank[i] = best
        mine[best] += weights[i] * slowness[best]
