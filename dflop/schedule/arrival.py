"""The data-blind order: what a trainer does that counts samples and never looks at them. Baseline of every claim."""

from __future__ import annotations

from collections.abc import Mapping

from dflop.records import LLM, Plan
from dflop.schedule.items import ModuleItems, Owner, split_evenly


def arrival_owners(plan: Plan, items: Mapping[str, ModuleItems]) -> dict[str, Owner]:
    """Samples in arrival order cut into microbatches x ranks buckets of equal count.

    Bucket j goes to microbatch j // R on LLM rank j % R; a microbatch's media items are cut by equal count over the
    encoder's ranks. A short batch leaves the last buckets empty.
    """
    num_ranks = plan.module(LLM).parallel.dp
    buckets = split_evenly(range(len(items[LLM].sample)), plan.num_microbatches * num_ranks)
    slots = tuple(tuple(buckets[k * num_ranks : (k + 1) * num_ranks]) for k in range(plan.num_microbatches))
    owners: dict[str, Owner] = {LLM: slots}
    for encoder in plan.encoders:
        in_slot = items_in_slots(items[encoder.module], slots)
        owners[encoder.module] = tuple(tuple(split_evenly(ids, encoder.parallel.dp)) for ids in in_slot)
    return owners


def items_in_slots(items: ModuleItems, slots: Owner) -> list[list[int]]:
    """Per microbatch the item ids of its samples, in arrival order."""
    slot_of = {position: k for k, slot in enumerate(slots) for bucket in slot for position in bucket}
    found: list[list[int]] = [[] for _ in slots]
    for item, position in enumerate(items.sample):
        found[slot_of[position]].append(item)
    return found
