"""How many tokens a plan's memory holds: of a microbatch, of the microbatches in flight, and of the encoders.

The search keeps these after every move, and `keeps` judges by the same figures. None is below what some assignment of
the batch can keep: a batch longer than those that were planned for must still run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dflop.records import LLM, ModulePlan, Plan
from dflop.schedule.assignment import Assignment
from dflop.schedule.evaluate import bucket_tokens
from dflop.schedule.items import Ints, ModuleItems
from dflop.schedule.pack import token_cap, token_lpt


@dataclass(frozen=True, slots=True)
class Caps:
    """Tokens that an assignment of one batch may not exceed."""

    bucket_tokens: int
    """Of the LLM, in one microbatch of one rank."""
    window: int
    """Consecutive microbatches that the LLM's first stage holds at once."""
    in_flight_tokens: int
    """Of the LLM, in any such window of a rank. Below `window` full buckets where the batch is longer than planned."""
    media_tokens: Mapping[str, int]
    """Per encoder, in one microbatch of one rank; those that memory does not bind are left out."""


def plan_caps(plan: Plan, items: Mapping[str, ModuleItems], *, compiled: bool) -> Caps:
    """Caps of a batch under a plan."""
    llm, num_tokens = plan.module(LLM), items[LLM].num_tokens
    num_buckets = plan.num_microbatches * llm.parallel.dp
    packable = token_cap(num_tokens, num_buckets, compiled=compiled)
    in_flight = max(llm.max_tokens, packable)
    if 0 < llm.max_tokens < packable:
        lpt = token_lpt(num_tokens, num_buckets, compiled=compiled)
        in_flight = max(llm.max_tokens, int(np.bincount(lpt, num_tokens).max(initial=0)))
    window = min(plan.num_microbatches, llm.parallel.pp)
    media = {e.module: _media_cap(plan, e, items[e.module]) for e in plan.encoders if e.max_tokens}
    return Caps(max(llm.max_tokens, packable), window, window * in_flight, media)


def keeps(caps: Caps, plan: Plan, items: Mapping[str, ModuleItems], assignment: Assignment) -> bool:
    """Whether an assignment exceeds none of the caps."""
    num_slots = plan.num_microbatches
    tokens = bucket_tokens(items[LLM], assignment, num_slots, plan.module(LLM).parallel.dp)
    if tokens.max(initial=0) > caps.bucket_tokens:
        return False
    in_flight = np.lib.stride_tricks.sliding_window_view(tokens, caps.window, axis=0).sum(axis=-1)
    if in_flight.max(initial=0) > caps.in_flight_tokens:
        return False
    return all(
        bucket_tokens(items[name], assignment, num_slots, plan.module(name).parallel.dp).max(initial=0) <= cap
        for name, cap in caps.media_tokens.items()
    )


def tokens_of_samples(items: ModuleItems, num_samples: int) -> Ints:
    """`[samples]` tokens that each brings to a module."""
    return np.bincount(items.sample_of, items.num_tokens, num_samples).astype(np.int64)


def _media_cap(plan: Plan, encoder: ModulePlan, items: ModuleItems) -> int:
    """Never below what cannot be divided: an item, or in an inline plan all of a sample."""
    whole = items.num_tokens
    if plan.is_inline:
        whole = tokens_of_samples(items, 1 + int(items.sample_of.max(initial=0)))
    return max(encoder.max_tokens, int(whole.max(initial=0)))
