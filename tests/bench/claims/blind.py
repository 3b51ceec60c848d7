"""Data-blind baselines that keep to their memory, and those that pad.

A planner that knows the average batch finds layouts that some real batch overflows: in arrival order a microbatch may
get several of the longest samples. Whoever trains so meets an out-of-memory error and lowers something until it fits.
So each baseline is told twice: *uncharged*, the fastest layout, over its memory or not, and *charged*, the fastest one
that holds every batch at hand in arrival order. Both have hindsight: the unseen batches decide what holds.

Padding: every LLM input as long as the longest one of its microbatch, or, as pipelines with fixed shapes have it, as
the longest one of the global batch. Padded tokens cost what others cost, and take as much memory.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from dflop.jobs.suite.cases import Setting
from dflop.plan.baselines.uniform import MIN_SIMULATED, PRUNE_RATIO, uniform_plans
from dflop.plan.rank import contention
from dflop.records import LLM, Plan
from dflop.schedule.assignment import Assignment
from dflop.schedule.caps import keeps
from dflop.schedule.evaluate import StepEvaluator
from dflop.schedule.items import ModuleItems, module_items
from dflop.schedule.policies import QUICK, StepJob

Padding = Literal["", "microbatch", "batch"]
PADDINGS: tuple[Padding, ...] = ("", "microbatch", "batch")


@dataclass(frozen=True, slots=True)
class BlindSteps:
    """A layout on the unseen batches."""

    plan: Plan
    step_s: tuple[float, ...]
    num_over_memory: int
    """Batches that would run out of memory."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best uniform layouts under one kind of padding."""

    uncharged: BlindSteps
    charged: BlindSteps | None
    """None: no layout holds every batch."""


def padded(
    items: Mapping[str, ModuleItems], assignment: Assignment, num_ranks: int, padding: Padding
) -> dict[str, ModuleItems]:
    """Items of a batch whose LLM inputs are padded.

    Args:
        items: As they are.
        assignment: Which samples share a microbatch.
        num_ranks: Replicas of the LLM.
        padding: To the longest of what; empty: none.
    """
    llm = items[LLM]
    if not padding or not len(llm.num_tokens):
        return dict(items)
    bucket = assignment.slot * num_ranks + assignment.rank if padding == "microbatch" else 0 * assignment.slot
    longest = np.zeros(int(bucket.max()) + 1, dtype=np.int64)
    np.maximum.at(longest, bucket, llm.num_tokens)
    tokens = longest[bucket]
    return {**items, LLM: replace(llm, num_tokens=tokens, sum_sq_tokens=tokens**2)}


class Blind:
    """Uniform layouts in arrival order on the batches of a setting.

    Args:
        setting: Problem and unseen batches.
    """

    def __init__(self, setting: Setting) -> None:
        problem = setting.problem
        self._problem = problem
        self._planned = list(zip(problem.batches, problem.batch_items, strict=True))
        self._unseen = [
            (batch, {s.module: module_items(batch, s.module) for s in problem.specs}) for batch in setting.unseen
        ]
        self.plans = sorted(uniform_plans(problem), key=lambda p: (p.formula_step_s, p.plan_id))
        """All that fit by the average batch, the best by the planning formula first."""

    def step(self, plan: Plan, number: int, padding: Padding = "") -> tuple[float, bool]:
        """(seconds with synchronisation, whether it fits) of a batch; those that are planned for come first."""
        batch, items = (self._planned + self._unseen)[number]
        job = StepJob(plan, batch, self._problem.cost, contention(self._problem, plan), items)
        assignment = job.assign("arrival", QUICK)
        judge, found = job.judge, job.items
        if padding:
            found = padded(job.items, assignment, plan.module(LLM).parallel.dp, padding)
            judge = StepEvaluator(plan, found, job.cost, judge.max_concurrency)
        return judge.step_s(assignment) + plan.sync_s, keeps(job.caps, plan, found, assignment)

    def on_unseen(self, plan: Plan, padding: Padding = "") -> BlindSteps:
        """On the batches that all are judged on."""
        first = len(self._planned)
        found = [self.step(plan, first + i, padding) for i in range(len(self._unseen))]
        return BlindSteps(plan, tuple(step_s for step_s, _ in found), sum(not fits for _, fits in found))

    def holds(self, plan: Plan, padding: Padding = "") -> bool:
        """Whether every batch fits, planned for or not."""
        return all(self.step(plan, i, padding)[1] for i in range(len(self._planned) + len(self._unseen)))

    def mean_step_s(self, plan: Plan, padding: Padding = "") -> float:
        """Over the batches that are planned for."""
        return statistics.fmean(self.step(plan, i, padding)[0] for i in range(len(self._planned)))

    def tune(self, padding: Padding) -> Tuned:
        """The fastest layout by simulation on the batches planned for, and the fastest that holds all batches."""
        best: tuple[float, Plan] | None = None
        kept: tuple[float, Plan] | None = None
        for number, plan in enumerate(self.plans):
            is_far = plan.formula_step_s > PRUNE_RATIO * self.plans[0].formula_step_s
            if number >= MIN_SIMULATED and kept and is_far:
                break
            step_s = self.mean_step_s(plan, padding)
            if best is None or step_s < best[0]:
                best = step_s, plan
            if (kept is None or step_s < kept[0]) and self.holds(plan, padding):
                kept = step_s, plan
        assert best is not None, "some uniform plan fits, or the contest would not have begun"
        return Tuned(self.on_unseen(best[1], padding), self.on_unseen(kept[1], padding) if kept else None)

    def charged_default(self, default: Plan) -> BlindSteps | None:
        """The default layout, or with its tp the shallowest one with the most microbatches that holds all batches."""
        for plan in (default, *self._after(default)):
            if self.holds(plan):
                return self.on_unseen(plan)
        return None

    def _after(self, default: Plan) -> Iterator[Plan]:
        def depth(plan: Plan) -> tuple[int, int]:
            return plan.module(LLM).parallel.pp, -plan.num_microbatches

        tp = default.module(LLM).parallel.tp
        yield from sorted((p for p in self.plans if p.module(LLM).parallel.tp == tp), key=depth)


def mean_ratio(baseline_s: Sequence[float], ours_s: Sequence[float]) -> float:
    """Geometric mean over batches of baseline / ours."""
    return math.exp(statistics.fmean(math.log(b / o) for b, o in zip(baseline_s, ours_s, strict=True)))
