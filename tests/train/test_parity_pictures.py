"""Context-parallel ranks cut pictures and videos: losses and every gradient equal a single-process Hugging Face run.

A picture that is all a microbatch has, one of two rows, of which most ranks of four have nothing, clips of large and of
small frames, and a text. Deep features, frozen towers, layers that run again, FSDP2. Some layouts are in a lane.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import pytest

from dflop.records import LLM, Plan, StepPlan
from dflop.simulate.pieces import FramePart, dealt, frame_parts
from tests.models.generic.small import Small
from tests.models.tiny_families import CASES, Case
from tests.train.parity import Trial, assert_equal_steps, reference, run_trial
from tests.train.synthetic import ALL, assign, make_inline_plan, sharing
from tests.train.test_parity import in_lane
from tests.train.tiny_subject import Tiny

SAMPLES = [
    [("image", 200, 290, 1, 0.0)],
    [],
    [("image", 56, 28, 1, 0.0)],
    [("video", 150, 120, 6, 3.0), ("image", 64, 40, 1, 0.0)],
    [("video", 30, 75, 6, 4.0), ("image", 120, 200, 1, 0.0)],
]
LIMITS = {"max_pixels": 28 * 28 * 90, "video_max_pixels": 28 * 28 * 60, "video_max_frames": 6}
SLOTS = ((0, 0, 1, 2, 3), (1, 0, 3, 1, 2))
"""Microbatch of every sample in each step."""


@dataclass(frozen=True)
class Pictures(Tiny):
    """A tiny family with items that are large for a microbatch."""

    @cached_property
    def case(self) -> Case:
        case = CASES[self.name]
        return replace(case, media={**case.media, **LIMITS}, samples=SAMPLES)


@dataclass(frozen=True)
class Cut:
    """How it is trained."""

    name: str = "Qwen3-VL"
    cp: int = 2
    dp: int = 1
    in_two: bool = False
    """Whether the second half of the LLM is on a second stage."""
    sharded: int = 0
    recompute: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    bad: tuple[int, ...] = ()
    max_tokens: int = 0

    @property
    def subject(self) -> Pictures:
        return Pictures(self.name)

    @property
    def plan(self) -> Plan:
        depth = {s.module: s.num_layers for s in self.subject.family.specs()}
        stages = [depth] if not self.in_two else [{**depth, LLM: 2}, {LLM: depth[LLM] - 2}]
        plan = make_inline_plan(stages, dp=self.dp, cp=self.cp, num_microbatches=4)
        modules = (
            replace(m, recompute=m.module in self.recompute, max_tokens=self.max_tokens if m.module != LLM else 0)
            for m in sharing(plan, self.sharded).modules
        )
        return cutting(replace(plan, modules=tuple(modules)), self.subject.family.specs()[0].merge_tokens)

    @property
    def trial(self) -> Trial:
        plans = []
        for step, (batch, slots) in enumerate(zip(self.subject.batches, SLOTS, strict=True)):
            rng = np.random.default_rng([5, step])
            replica = lambda dp, rng=rng: int(rng.integers(dp))  # noqa: E731  # bound to its step
            plans.append(assign(self.plan, batch, step, slots=slots, replica=replica, shuffled=rng.permutation))
        return Trial(self.subject, self.plan, tuple(plans), self.frozen, self.bad)


def cutting(plan: Plan, merge_tokens: int) -> Plan:
    """A plan whose ranks cut frames."""
    modules = (m if m.module == LLM else replace(m, merge_tokens=merge_tokens, cost_growth=0.01) for m in plan.modules)
    return replace(plan, modules=tuple(modules))


HEART = {
    "cp2, half of the llm behind it": Cut(in_two=True, recompute=("vision",), bad=(3,)),
    "cp4, recomputed": Cut(cp=4, recompute=("vision", LLM)),
    "cp2, sharded, tower frozen": Cut(sharded=ALL, frozen=("vision.tower",)),
    "cp3, Qwen2-VL, tokens dealt out evenly": Cut("Qwen2-VL", cp=3, max_tokens=1),
}
OTHERS = {
    "cp4": Cut(cp=4),
    "cp4, sharded, recomputed": Cut(cp=4, sharded=ALL, recompute=("vision", LLM)),
    "cp2, tower frozen": Cut(frozen=("vision.tower",)),
    "cp3, tokens dealt out evenly, sharded": Cut(cp=3, max_tokens=1, sharded=ALL),
    "cp2 dp2, sharded": Cut(dp=2, sharded=ALL),
    "cp2 dp2, sharded in twos, tower frozen": Cut(dp=2, sharded=2, frozen=("vision.tower",)),
    "cp4, llm frozen": Cut(cp=4, frozen=(LLM,)),
    "cp4, all of vision frozen": Cut(cp=4, frozen=("vision",), recompute=(LLM,)),
    "cp4, Qwen2-VL, sharded": Cut("Qwen2-VL", cp=4, sharded=ALL),
}
cached_reference = cache(reference)


@pytest.mark.parametrize("name", [*HEART, *in_lane(OTHERS)])
def test_gradients_equal_hugging_face(name, tmp_path):
    layout = (HEART | OTHERS)[name]
    expected = cached_reference(layout.subject, frozen=layout.frozen, bad_positions=layout.bad)
    assert_equal_steps(run_trial(layout.trial, tmp_path), expected)


@pytest.mark.parametrize("kind", ["qwen3_vl_moe", *in_lane(["glm4v_moe"])])
def test_gradients_of_a_model_without_a_family_equal_transformers(kind, tmp_path):
    subject = Small(kind)
    depth = {s.module: s.num_layers for s in subject.family.specs()}
    plan, plans = cutting(make_inline_plan([depth], dp=1, cp=2, tp=2, num_microbatches=3), 4), list[StepPlan]()
    for step, batch in enumerate(subject.batches):
        slots = [(n + step) % 3 for n in range(len(batch))]
        plans.append(assign(plan, batch, step, slots=slots, replica=lambda dp: 0, shuffled=range))
    assert parts_of_frames(plan, plans[0], subject.batches[0])
    assert_equal_steps(run_trial(Trial(subject, plan, tuple(plans)), tmp_path), cached_reference(subject))


def parts_of_frames(plan: Plan, step_plan: StepPlan, batch) -> list[list[list[FramePart]]]:
    """Per microbatch in which ranks share a frame, per rank its parts."""
    work, found = step_plan.of("vision"), []
    media = lambda i: batch[work.item_sample[i]].items[work.item_rank_in_sample[i]]  # noqa: E731
    each = lambda i: media(i).num_tokens // media(i).grid[0]  # noqa: E731
    for k in range(plan.num_microbatches):
        of_ranks = [frame_parts(of, 4, each) for of in dealt(plan, step_plan, "vision", k, 0, media)]
        ranks = defaultdict(set)
        for rank, of in enumerate(of_ranks):
            for part in of:
                ranks[part.item, part.frame].add(rank)
        if any(len(of) > 1 for of in ranks.values()):
            found.append(of_ranks)
    return found


def test_trials_meet_what_is_hard():
    """A frame on all ranks, one on some, a rank with nothing, one with parts of two items, one with several frames."""
    found = set()
    for layout in HEART.values():
        for batch, step_plan in zip(layout.subject.batches, layout.trial.step_plans, strict=True):
            for of_ranks in parts_of_frames(layout.plan, step_plan, batch):
                frames = [(p.item, p.frame) for of in of_ranks for p in of]
                found |= {"rank with nothing" for of in of_ranks if not of}
                found |= {"whole group" for f in frames if frames.count(f) == len(of_ranks)}
                found |= {"frame on some" for f in frames if 1 < frames.count(f) < len(of_ranks)}
                found |= {"two items" for of in of_ranks if len({p.item for p in of}) > 1}
                found |= {"later frames" for of in of_ranks for a, b in itertools.pairwise(of) if b.frame > a.frame}
    assert found == {"rank with nothing", "whole group", "frame on some", "two items", "later frames"}
