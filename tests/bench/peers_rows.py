"""All peers in one cell: batchers on dflop's plan and on the tuned uniform one, and planners."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflop.errors import InfeasiblePlanError
from dflop.jobs.suite.judge import judge
from dflop.plan.baselines.reference import argmin, literal, reference_plan
from dflop.plan.baselines.uniform import default_plan, tuned_uniform
from dflop.plan.drafts import holding
from dflop.plan.rank import arrival_step_s, scheduled_step_s
from dflop.plan.search import plan_problem
from dflop.plan.space import Problem
from dflop.records import LLM, Plan, SampleShape
from dflop.schedule.assignment import Assignment, even_item_ranks
from dflop.schedule.items import module_items
from dflop.schedule.policies import QUICK, Effort, StepJob
from tests.bench.peers_packages import Batcher, Place, batchers

COUNTS = (2, 4, 8, 16, 32, 64)
"""Numbers of microbatches that all planners, and peers with a count of their choice, may choose from."""
SAME = 1e-9
"""Relative difference below which two step times are equal."""
MEGATRON = "re-expressed: every uniform (tp, pp, dp) and count, as Megatron-LM lays models out"
REFERENCE = "re-expressed: DFLOP at 60e86d8"
Batches = Sequence[Sequence[SampleShape]]
Row = dict[str, Any]
"""One peer in one cell. `kind`: `batch` or `plan`. `on`: whose plan, `dflop` or `uniform`; of planners the scheduler,
`dflop` or `own`. `ratio`: its seconds over dflop's on the same global batches."""


@dataclass
class Result:
    """What a peer made of global batches."""

    step_s: list[float] = field(default_factory=list)
    num_over_memory: int = 0
    """Batches in which a rank would hold more tokens than the plan's memory has room for."""
    decide_s: list[float] = field(default_factory=list)

    def add(self, step_s: float, fits: bool, decide_s: float) -> None:
        self.step_s.append(step_s)
        self.num_over_memory += not fits
        self.decide_s.append(decide_s)

    def row(self, kind: str, peer: str, origin: str, count: str, ours_s: Sequence[float]) -> Row:
        """Ratios to six digits; what differs by rounding alone is 1."""
        ratios = [p / o for p, o in zip(self.step_s, ours_s, strict=True)]
        found = {"ratio": [1.0 if abs(r - 1) < SAME else round(r, 6) for r in ratios]}
        found |= {"num_over_memory": self.num_over_memory, "decide_s": float(np.median(self.decide_s))}
        return {"kind": kind, "peer": peer, "origin": origin, "count": count, **found}


class Board:
    """Jobs of one plan's layout on the same batches, by number of microbatches."""

    def __init__(self, problem: Problem, plan: Plan, batches: Batches) -> None:
        self.plan, self.batches, self._problem = plan, batches, problem
        self._items = [{m.module: module_items(batch, m.module) for m in plan.modules} for batch in batches]
        self._plans: dict[int, Plan | None] = {plan.num_microbatches: plan}
        self._jobs: dict[tuple[int, int], StepJob] = {}

    def counts(self) -> list[int]:
        """Numbers of microbatches for which the layout has memory and the batch samples; the plan's first."""
        given, most = self.plan.num_microbatches, self._problem.global_batch_size // self.plan.module(LLM).parallel.dp
        return [given, *(m for m in COUNTS if m != given and m <= most and self._plan(m) is not None)]

    def job(self, count: int, batch: int) -> StepJob:
        """Of a number of microbatches; memory's caps are the given plan's where the layout has no room for so many."""
        if (count, batch) not in self._jobs:
            plan = self._plan(count) or dataclasses.replace(self.plan, num_microbatches=count)
            self._jobs[count, batch] = StepJob(plan, self.batches[batch], self._problem.cost, items=self._items[batch])
        return self._jobs[count, batch]

    def dflop(self, count: int | None = None, effort: Effort | None = None) -> Result:
        """Our scheduler; a count of None is the plan's."""
        found, plan = Result(), self.job(count or self.plan.num_microbatches, 0).plan
        for batch in self.batches:
            began_s = time.perf_counter()
            job = StepJob(plan, batch, self._problem.cost)
            _, assignment, step_s = job.best(effort or Effort())
            decide_s = time.perf_counter() - began_s
            found.add(step_s + self.plan.sync_s, job.keeps_caps(assignment), decide_s)
        return found

    def judged(self, count: int, batch: int, place: Place) -> tuple[float, bool]:
        """(seconds of the step, whether memory holds it)."""
        slot, rank = place
        count = max(count, 1 + int(slot.max()))
        job, items = self.job(count, batch), {}
        for e in job.plan.encoders:
            of = job.items[e.module]
            inline = job.plan.is_inline
            items[e.module] = rank[of.sample_of] if inline else even_item_ranks(of, slot, count, e.parallel.dp)
        assignment = Assignment(slot, rank, items)
        fits = self._plan(count) is not None and job.keeps_caps(assignment)
        return job.judge.step_s(assignment) + self.plan.sync_s, fits

    def run(self, count: int, peer: Batcher) -> Result:
        """A batcher on all batches."""
        found = Result()
        for k in range(len(self.batches)):
            job = self.job(count, k)
            _ = job.linear  # costs are there when our own search begins, too
            began_s = time.perf_counter()
            place = peer.decide(job, k)
            decide_s = time.perf_counter() - began_s
            found.add(*self.judged(1 if peer.counts_itself else count, k, place), decide_s)
        return found

    def _plan(self, count: int) -> Plan | None:
        if count not in self._plans:
            self._plans[count] = holding(self._problem, dataclasses.replace(self.plan, num_microbatches=count))
        return self._plans[count]


def best_count(results: Mapping[int, Result]) -> int:
    """The count that is fastest on these very batches, those that keep to the memory before all others."""
    return min(results, key=lambda m: (results[m].num_over_memory, np.mean(results[m].step_s)))


def rows_of(problem: Problem, unseen: Batches) -> list[Row]:
    """Every peer on global batches nobody planned for."""
    plans = {name: _timed(make) for name, make in _planners(problem).items()}
    rows, ours_s = [], []
    for on in ("dflop", "uniform"):
        plan = plans[on][0]
        if plan is None:
            continue
        board = Board(problem, plan, unseen)
        base = own = board.dflop()
        if on == "dflop":
            ours_s = base.step_s
        else:  # a count chosen as peers choose theirs, by quick looks at these very batches
            own = board.dflop(best_count({m: board.dflop(m, QUICK) for m in board.counts()}))
        decide_s = float(np.median(base.decide_s))
        rows += [row | {"on": on, "dflop_decide_s": decide_s} for row in _batch_rows(board, own)]
    plan_s = plans["dflop"][1]
    return [*rows, *(row | {"dflop_decide_s": plan_s} for row in _plan_rows(problem, plans, unseen, ours_s))]


def _planners(problem: Problem) -> dict[str, Callable[[], Plan | None]]:
    return {
        "dflop": lambda: plan_problem(problem)[0],
        "uniform": lambda: tuned_uniform(problem, lambda plan: arrival_step_s(problem, plan)),
        "uniform, our batches": lambda: tuned_uniform(problem, lambda plan: scheduled_step_s(problem, plan)),
        "default": lambda: default_plan(problem),
        "reference": lambda: reference_plan(problem, literal).plan,
        "reference, rule mended": lambda: reference_plan(problem, argmin).plan,
    }


def _timed(make: Callable[[], Plan | None]) -> tuple[Plan | None, float]:
    began_s = time.perf_counter()
    try:
        plan = make()
    except InfeasiblePlanError:
        plan = None
    return plan, time.perf_counter() - began_s


def _batch_rows(board: Board, ours: Result) -> Iterator[Row]:
    """Every batcher with the number of microbatches that suits it best, or that it makes itself."""
    for peer in batchers():
        results = {m: board.run(m, peer) for m in board.counts()[: 1 if peer.counts_itself else None]}
        count = "packed" if peer.counts_itself else "own"
        yield results[best_count(results)].row("batch", peer.name, peer.origin, count, ours.step_s)


def _plan_rows(
    problem: Problem, plans: Mapping[str, tuple[Plan | None, float]], unseen: Batches, ours_s: Sequence[float]
) -> Iterator[Row]:
    """Every planner's plan under dflop's scheduler and under its own: arrival order, or the reference's objective."""
    rivals = (
        ("uniform", MEGATRON + "; tuned in arrival order", "arrival"),
        ("uniform, our batches", MEGATRON + "; tuned under dflop's scheduler", None),
        ("default", "re-expressed: largest tp, least pp that fits, one sample a microbatch", "arrival"),
        ("reference", REFERENCE + ", its literal rule", "bottleneck"),
        ("reference, rule mended", REFERENCE + ", the fastest by its formula", "bottleneck"),
    )
    for name, origin, habit in rivals:
        plan, seconds = plans[name]
        if plan is None:
            continue  # none fits, or the model has not just one encoder
        for on, policy in (("dflop", "balanced"), ("own", habit)):
            if policy:
                found = judge(plan, unseen, problem.cost, problem.cluster, policy)
                fits = all(p <= problem.usable_bytes for part in plan.modules for p in part.stage_memory_bytes)
                result = Result(list(found.step_s), found.num_over_cap if fits else len(unseen), [seconds])
                yield result.row("plan", f"planner: {name}", origin, "plan's", ours_s) | {"on": on}
