"""A step in the terms the search works with: seconds that add up over samples, per kind of stage.

Kinds are stages that cost the same. A sample adds its seconds to one bucket of the chain it passes (the LLM's stages
with all that they hold), and its media items add theirs to the slot's share of each encoder. That is divided
evenly over the encoder's ranks, in proportion to their speeds where some are slow, but for the largest item, which one
of them does alone. Every microbatch costs something fixed on top. This is close to the cost model, not equal to it:
what the search finds is judged by `StepEvaluator`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dflop.cost.model import CostModel, Floats, StageKind, stage_kind
from dflop.records import LLM, ModulePlan, Plan
from dflop.schedule.caps import Caps, tokens_of_samples
from dflop.schedule.items import Ints, ModuleItems, stage_mix, stage_slowness
from dflop.simulate.kernel import Bools
from dflop.simulate.order import num_stages_after
from dflop.simulate.step import Node, meeting


class Part(NamedTuple):
    """Seconds of a stage that its ranks spend without waiting for one another."""

    row: int
    """Row of `chain_s` (the chain's) or of `slot_s`."""
    fixed_s: float
    """Seconds of every microbatch."""
    forward_frac: float
    group: int = 1
    """Neighbouring ranks that meet before and behind it; 1: none."""
    gather_s: float = 0.0
    """Seconds of a forward pass's messages; the backward pass's take `gather_s + scatter_s`."""
    scatter_s: float = 0.0
    limits: tuple[int, ...] = ()
    """Tokens of a bucket above each of which one more layer runs again in its backward pass."""


@dataclass(frozen=True, slots=True)
class LinearStep:
    """Arrays for the compiled search. Q kinds of chain stages, E encoder pipes with K kinds of stages in all."""

    num_slots: int
    num_ranks: int
    chain_s: Floats
    """`[Q, samples]` seconds, forward and backward."""
    chain_slowness: Floats
    """`[Q, ranks]` what multiplies them on each rank, fixed parts included."""
    slot_s: Floats
    """`[K, samples]` seconds of one of the encoder's ranks."""
    largest_s: Floats
    """`[K, samples]` seconds of a sample's largest item, which no split divides: a slot takes no less."""
    tokens: Ints
    """`[samples]`."""
    num_items: Ints
    """`[E, samples]` media items of encoders with ranks of their own."""
    pipe_pp: Ints
    """Encoders with one rank each, then the chain."""
    stage_parts: tuple[tuple[Part, ...], ...]
    """Per stage of all pipes, what it spends its seconds on; of an encoder one part."""
    num_after: Ints
    """Per stage of all pipes, stages between it and the loss."""
    cap_tokens: int
    """Tokens of one bucket."""
    window: int
    """Consecutive slots that a rank of the first chain stage holds at once."""
    cap_in_flight_tokens: int
    """Tokens of a rank's buckets in any such window."""
    media_tokens: Ints
    """`[encoders, samples]` tokens of the encoders, those on the chain too."""
    cap_media_tokens: Ints
    """`[encoders]` of a slot, of one on the chain of a bucket; 0: none."""
    on_chain: Bools
    """`[encoders]`: whether its items are where their sample is."""
    rerun_s: Floats = field(default_factory=lambda: np.zeros(0))
    """`[samples]` seconds in which one layer of the LLM runs again; empty where the same layers always do."""
    rerun_fixed_s: float = 0.0
    """Seconds of every microbatch, for each such layer."""

    @property
    def num_ops(self) -> int:
        """Operations of one simulated step."""
        return 2 * self.num_slots * (int(self.pipe_pp[:-1].sum()) + int(self.pipe_pp[-1]) * self.num_ranks)

    @property
    def slowest_stage(self) -> tuple[Floats, float, tuple[int, ...]]:
        """(`[samples]` seconds, fixed seconds of a microbatch, limits) of the chain's stage that has most to do."""
        stages = (
            (
                self.chain_s[[part.row for part in of]].sum(axis=0), sum(part.fixed_s for part in of),
                sum((part.limits for part in of), ()),
            )
            for of in self.stage_parts[int(self.pipe_pp[:-1].sum()) :]
        )  # fmt: skip
        return max(stages, key=lambda of: float(of[0].sum()))

    @property
    def meets(self) -> bool:
        """Whether ranks of the chain wait for one another in every microbatch."""
        return any(part.group > 1 for of in self.stage_parts[int(self.pipe_pp[:-1].sum()) :] for part in of)

    @property
    def replica_slowness(self) -> Floats:
        """`[ranks]` how much longer the slowest stage of each rank's chain takes than it would if all were as fast."""
        total_s = self.chain_s.sum(axis=1, keepdims=True)
        weight = total_s / total_s.max() if total_s.any() else np.ones_like(total_s)
        slowest: Floats = (weight * self.chain_slowness).max(axis=0)
        return slowest


def linear_step(
    plan: Plan,
    items: Mapping[str, ModuleItems],
    cost: CostModel,
    caps: Caps,
    slowness: Mapping[Node, float] | None = None,
) -> LinearStep:
    """The step of a global batch under a plan, of whose nodes some may be slow."""
    llm = plan.module(LLM)
    num_samples = len(items[LLM].sample)
    pipes = sorted(plan.pipes, key=lambda m: m.module == LLM)
    rows = {True: _Rows(), False: _Rows()}
    stage_parts, after = [], []
    for pipe in pipes:
        is_chain = pipe.module == LLM
        slow = stage_slowness(pipe, slowness)
        for stage in range(pipe.parallel.pp):
            after.append(num_stages_after(plan, pipe.module, stage))
            inside = [p for p in plan.grid_of(pipe.module) if p.layers_per_stage[stage]]
            alone = [[p] for p in inside if meeting(p, stage)[0] > 1]
            together = [p for p in inside if meeting(p, stage)[0] == 1]
            stage_parts.append(tuple(
                rows[is_chain].part(plan, stage, members, items, cost, slow, is_chain=is_chain)
                for members in ([together] if together or not alone else []) + alone
            ))  # fmt: skip
    media = [tokens_of_samples(items[e.module], num_samples) for e in plan.encoders]
    rerun_s, rerun_fixed_s = _rerun(plan, items[LLM], cost) if llm.recompute_tokens else (np.zeros(0), 0.0)
    return LinearStep(
        num_slots=plan.num_microbatches,
        num_ranks=llm.parallel.dp,
        chain_s=np.array(rows[True].seconds).reshape(-1, num_samples),
        chain_slowness=np.array(rows[True].slowness),
        slot_s=np.array(rows[False].seconds).reshape(-1, num_samples),
        largest_s=np.array(rows[False].largest).reshape(-1, num_samples),
        tokens=items[LLM].num_tokens,
        num_items=np.array(
            [np.bincount(items[m.module].sample_of, minlength=num_samples) for m in pipes[:-1]], dtype=np.int64
        ).reshape(-1, num_samples),
        pipe_pp=np.array([m.parallel.pp for m in pipes], dtype=np.int64),
        stage_parts=tuple(stage_parts),
        num_after=np.array(after, dtype=np.int64),
        cap_tokens=caps.bucket_tokens,
        window=caps.window,
        cap_in_flight_tokens=caps.in_flight_tokens,
        media_tokens=np.array(media, dtype=np.int64).reshape(-1, num_samples),
        cap_media_tokens=np.array([_media_cap(plan, e, caps, of) for e, of in zip(plan.encoders, media, strict=True)]),
        on_chain=np.array([plan.follows_samples(e.module) for e in plan.encoders], dtype=np.bool_),
        rerun_s=rerun_s,
        rerun_fixed_s=rerun_fixed_s,
    )


class _Rows:
    """Rows of seconds: stages that cost the same share one."""

    def __init__(self) -> None:
        self.seconds: list[Floats] = []
        self.slowness: list[Floats] = []
        self.largest: list[Floats] = []
        self._seen: dict[object, Part] = {}

    def part(
        self, plan: Plan, stage: int, members: Sequence[ModulePlan], items: Mapping[str, ModuleItems], cost: CostModel,
        slow: Floats, *, is_chain: bool,
    ) -> Part:  # fmt: skip
        """The seconds of modules on a stage that do not wait for other ranks between one another."""
        key = [(p, stage_kind(p, stage)) for p in members]
        group, gather_s, scatter_s = 1, 0.0, 0.0
        for p in members:  # several have groups of one, with or without messages
            group, ahead_s, behind_s = meeting(p, stage)
            gather_s, scatter_s = gather_s + ahead_s, scatter_s + behind_s
        known = (*((p.module, kind) for p, kind in key), slow[stage].tobytes(), group, gather_s, scatter_s)
        if known not in self._seen:
            kind = [_part(plan, p, of_part, items[p.module], cost) for p, of_part in key]
            num_samples = len(items[LLM].sample)
            per_sample = np.zeros(num_samples)
            for p, (seconds, _, _) in zip(members, kind, strict=True):
                per_sample += np.bincount(items[p.module].sample_of, seconds, num_samples)
            total = sum(float(seconds.sum()) for seconds, _, _ in kind) or 1.0
            frac = sum(float(seconds.sum()) * f for seconds, _, f in kind) / total
            fixed_s = sum(o for _, o, _ in kind) * (1.0 if is_chain else float(slow[stage].max()))
            limits = sum((k.limits for _, k in key), ())
            self._seen[known] = Part(len(self.seconds), fixed_s, frac or 1 / 3, group, gather_s, scatter_s, limits)
            self.seconds.append(per_sample / (1.0 if is_chain else _num_parts(slow, stage)))
            self.slowness.append(slow[stage])
            if not is_chain:
                self.largest.append(np.zeros(num_samples))
                np.maximum.at(self.largest[-1], items[members[0].module].sample_of, kind[0][0] * slow[stage].min())
        return self._seen[known]


def _num_parts(slow: Floats, stage: int) -> float:
    """By what a slot's seconds are divided on a stage of an encoder, whose ranks get items in proportion to speed.

    A rank is as slow as its slowest stage; the stage waits for the rank that is slowest there.
    """
    of_rank = slow.max(axis=0)
    return float(((1.0 / of_rank).sum() * of_rank / slow[stage]).min())


def _media_cap(plan: Plan, encoder: ModulePlan, caps: Caps, of_samples: Ints) -> int:
    """What an encoder's ranks hold together, for the search knows slots, not ranks; on the chain: one rank. 0: no cap.

    A sample with more than that has to go somewhere.
    """
    num_ranks = 1 if plan.follows_samples(encoder.module) else encoder.parallel.dp
    cap = caps.media_tokens.get(encoder.module, 0) * num_ranks
    return max(cap, int(of_samples.max(initial=0))) if cap else 0


def _part(
    plan: Plan, part: ModulePlan, kind: StageKind, items: ModuleItems, cost: CostModel
) -> tuple[Floats, float, float]:
    """One module's layers on a stage: (`[items]` seconds, fixed seconds of a microbatch, forward share)."""
    seconds = cost.item_seconds(part.module, items.loads, **kind.costs())
    if not len(seconds):
        return seconds, 0.0, 1 / 3
    num_buckets = max(1, min(plan.num_microbatches * part.parallel.dp, len(seconds)))
    typical = np.array([float(load.sum()) / num_buckets for load in items.loads])
    mix = stage_mix(part, kind, items, cost)
    factor = mix.factors(np.zeros(len(seconds), dtype=np.int64), 1)[0] if mix else None
    both = cost.module_seconds(part.module, typical, **kind.costs(), factor=factor)
    forward, backward = (float(seconds_s) for seconds_s in both)
    fixed_s = max(0.0, forward + backward - float(seconds.sum()) / num_buckets)
    return seconds, fixed_s, forward / (forward + backward) if forward + backward > 0 else 1 / 3


def _rerun(plan: Plan, samples: ModuleItems, cost: CostModel) -> tuple[Floats, float]:
    """(`[samples]` seconds, fixed seconds of a microbatch) in which one layer of the LLM runs again."""
    llm = plan.module(LLM)
    modes = (llm.parallel.mode.recomputing(share) for share in (0.0, 1.0))
    once, again = (_part(plan, llm, StageKind(1, False, mode), samples, cost) for mode in modes)
    return np.maximum(again[0] - once[0], 0.0), max(again[1] - once[1], 0.0)


def sample_weights(step: LinearStep) -> Floats:
    """`[samples, kinds]` seconds per bucket; the last kind is the chain's slowest.

    An encoder's are scaled to a bucket's share of its slot.
    """
    columns: Sequence[Floats] = [*(step.num_ranks * row for row in step.slot_s), *step.chain_s]
    order = sorted(range(len(columns)), key=lambda q: float(columns[q].sum()) if q >= len(step.slot_s) else -1.0)
    return np.stack([columns[q] for q in order], axis=1)
