"""How many tokens a plan's memory holds: of a microbatch, of the microbatches in flight, and of the encoders.

The search keeps these after every move, and `keeps` judges by the same figures. None is below what some assignment of
the batch can keep: a batch longer than those that were planned for must still run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop.records import LLM, ModulePlan, Plan, SampleShape, StepPlan
from dflop.schedule.assignment import Assignment, assignment_of
from dflop.schedule.evaluate import bucket_tokens
from dflop.schedule.items import Ints, ModuleItems, module_items
from dflop.schedule.pack import token_cap, token_lpt
from dflop.simulate import order


@dataclass(frozen=True, slots=True)
class Caps:
    """Tokens that an assignment of one batch may not exceed."""

    bucket_tokens: int
    """LLM tokens in one microbatch of one rank."""
    window: int
    """Consecutive microbatches that the LLM's first stage holds at once."""
    in_flight_tokens: int
    """LLM tokens in any such window of a rank. Below `window` full buckets where the batch is longer than planned."""
    media_tokens: Mapping[str, int]
    """Per encoder, in one microbatch of one rank; those that memory does not bind are left out."""


def plan_caps(plan: Plan, items: Mapping[str, ModuleItems]) -> Caps:
    """Caps of a batch under a plan."""
    llm, num_tokens = plan.module(LLM), items[LLM].num_tokens
    num_buckets = plan.num_microbatches * llm.parallel.dp
    packable = token_cap(num_tokens, num_buckets)
    in_flight = max(llm.max_tokens, packable)
    if 0 < llm.max_tokens < packable:
        lpt = token_lpt(num_tokens, num_buckets)
        in_flight = max(llm.max_tokens, int(np.bincount(lpt, num_tokens).max(initial=0)))
    window = int(order.in_flight(plan.num_microbatches, llm.parallel.pp - 1))
    media = {e.module: _media_cap(plan, e, items[e.module]) for e in plan.encoders if e.max_tokens}
    return Caps(max(llm.max_tokens, packable), window, window * in_flight, media)


@dataclass(frozen=True, slots=True)
class Fill:
    """The cap that an assignment fills most."""

    module: str
    num_tokens: int
    cap_tokens: int
    num_microbatches: int
    """Microbatches that hold these tokens together on one rank."""

    @property
    def frac(self) -> float:
        """Above 1: more than memory holds."""
        return self.num_tokens / self.cap_tokens if self.cap_tokens else float(self.num_tokens > 0)

    def __str__(self) -> str:
        where = "a microbatch" if self.num_microbatches == 1 else f"{self.num_microbatches} microbatches in flight"
        return (
            f"{self.num_tokens} tokens of `{self.module}` in {where} where memory allows {self.cap_tokens}, "
            f"{self.frac - 1:.0%} more"
        )


def fullest(caps: Caps, plan: Plan, items: Mapping[str, ModuleItems], assignment: Assignment) -> Fill:
    """The cap that an assignment fills most."""
    num_slots = plan.num_microbatches
    tokens = bucket_tokens(items[LLM], assignment, num_slots, plan.module(LLM).parallel.dp)
    in_flight = np.lib.stride_tricks.sliding_window_view(tokens, caps.window, axis=0).sum(axis=-1)
    found = [
        Fill(LLM, int(tokens.max(initial=0)), caps.bucket_tokens, 1),
        Fill(LLM, int(in_flight.max(initial=0)), caps.in_flight_tokens, caps.window),
    ]
    for name, cap in caps.media_tokens.items():
        media = bucket_tokens(items[name], assignment, num_slots, plan.module(name).parallel.dp)
        found.append(Fill(name, int(media.max(initial=0)), cap, 1))
    return max(found, key=lambda fill: fill.frac)


def keeps(caps: Caps, plan: Plan, items: Mapping[str, ModuleItems], assignment: Assignment) -> bool:
    """Whether an assignment exceeds none of the caps."""
    return fullest(caps, plan, items, assignment).frac <= 1


def exceeded(plan: Plan, batch: Sequence[SampleShape], step_plan: StepPlan) -> Fill | None:
    """The cap that a step plan exceeds most; None if it keeps all."""
    items = {m.module: module_items(batch, m.module) for m in plan.modules}
    fill = fullest(plan_caps(plan, items), plan, items, assignment_of(plan, step_plan))
    return fill if fill.frac > 1 else None


def tokens_of_samples(items: ModuleItems, num_samples: int) -> Ints:
    """`[samples]` tokens that each brings to a module."""
    return np.bincount(items.sample_of, items.num_tokens, num_samples).astype(np.int64)


def _media_cap(plan: Plan, encoder: ModulePlan, items: ModuleItems) -> int:
    """Never below what cannot be divided: an item, or on the LLM's ranks all of a sample."""
    whole = items.num_tokens
    if plan.follows_samples(encoder.module):
        whole = tokens_of_samples(items, 1 + int(items.sample_of.max(initial=0)))
    return max(encoder.max_tokens, int(whole.max(initial=0)))
