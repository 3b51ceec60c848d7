"""One plan and the global batches that all batchers are judged on, with as many microbatches as they like."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflop.plan.drafts import holding
from dflop.plan.space import Problem
from dflop.records import LLM, Plan, SampleShape
from dflop.schedule.items import Ints, module_items
from dflop.schedule.policies import QUICK, Effort, StepJob
from tests.bench.peers import cases
from tests.bench.peers.batchers import Place, blind_assignment

SAME = 1e-9
"""Relative difference below which two step times are equal."""


@dataclass
class Row:
    """One peer in one cell; ratios are its seconds over dflop's on the same global batches or epoch."""

    kind: str
    """`batch`: decides within the global batch. `epoch`: over many, which changes what is learnt. `plan`: a planner."""
    peer: str
    origin: str
    model: str
    data: str
    on: str
    """Whose plan: `dflop` or `uniform`; of planners the scheduler: `dflop` or `own`."""
    count: str
    """Number of microbatches: `plan's`, `own`, or `packed` where packing decides it."""
    ratio: list[float] = field(default_factory=list)
    num_over_memory: int = 0
    """Batches in which a rank would hold more tokens than the plan's memory has room for."""
    decide_s: float = math.nan
    """Median wall seconds of a batch's decision (of planners: of the plan)."""
    dflop_decide_s: float = math.nan
    note: str = ""

    @property
    def mean(self) -> float:
        """Geometric; NaN where the peer did not run."""
        return statistics.geometric_mean(self.ratio) if self.ratio else math.nan


@dataclass(frozen=True)
class Result:
    """What a peer made of all batches."""

    step_s: list[float]
    num_over_memory: int
    decide_s: float

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.step_s)


class Board:
    """Jobs of one plan's layout on the same batches, by number of microbatches."""

    def __init__(self, problem: Problem, plan: Plan, batches: Sequence[Sequence[SampleShape]]) -> None:
        self.plan, self.batches, self._problem = plan, batches, problem
        self._items = [{m.module: module_items(batch, m.module) for m in plan.modules} for batch in batches]
        self._plans: dict[int, Plan | None] = {plan.num_microbatches: plan}
        self._jobs: dict[tuple[int, int], StepJob] = {}

    @property
    def num_ranks(self) -> int:
        return self.plan.module(LLM).parallel.dp

    @property
    def num_tokens(self) -> list[Ints]:
        """Of the language model, per batch and sample."""
        return [items[LLM].num_tokens for items in self._items]

    def counts(self) -> list[int]:
        """Numbers of microbatches for which the layout has memory and the batch samples; the plan's own first."""
        own, size = self.plan.num_microbatches, self._problem.global_batch_size
        others = [m for m in cases.COUNTS if m != own and m * self.num_ranks <= size and self._plan(m) is not None]
        return [own, *others]

    def job(self, count: int, batch: int) -> StepJob:
        """Of a number of microbatches; memory's caps are the given plan's where the layout has no room for so many."""
        if (count, batch) not in self._jobs:
            plan = self._plan(count) or dataclasses.replace(self.plan, num_microbatches=count)
            self._jobs[count, batch] = StepJob(plan, self.batches[batch], self._problem.cost, items=self._items[batch])
        return self._jobs[count, batch]

    def dflop(self, count: int | None = None, effort: Effort | None = None) -> Result:
        """Our scheduler; a count of None is the plan's."""
        found, seconds, over = [], [], 0
        plan = self.job(count or self.plan.num_microbatches, 0).plan
        for batch in self.batches:
            started = time.perf_counter()
            job = StepJob(plan, batch, self._problem.cost)
            _, assignment, step_s = job.best(effort or Effort())
            seconds.append(time.perf_counter() - started)
            found.append(step_s + self.plan.sync_s)
            over += not job.keeps_caps(assignment)
        return Result(found, over, statistics.median(seconds))

    def dflop_with_own_count(self) -> Result:
        """Our scheduler with a count chosen as peers choose theirs, by quick looks at these very batches."""
        return self.dflop(best_count({m: self.dflop(m, QUICK) for m in self.counts()}))

    def judged(self, count: int, batch: int, place: Place) -> tuple[float, bool]:
        """(seconds of the step, whether memory holds it)."""
        needed = max(count, 1 + int(place[0].max()))
        job = self.job(needed, batch)
        assignment = blind_assignment(job, place)
        fits = self._plan(needed) is not None and job.keeps_caps(assignment)
        return job.judge.step_s(assignment) + self.plan.sync_s, fits

    def run(self, count: int, decide: Callable[[StepJob, int], Place], *, counts_itself: bool = False) -> Result:
        """A batcher on all batches.

        Raises:
            ValueError: it cannot do with so many microbatches.
        """
        found, seconds, over = [], [], 0
        for k in range(len(self.batches)):
            job = self.job(count, k)
            _ = job.linear  # costs are there when our own search begins, too
            started = time.perf_counter()
            place = decide(job, k)
            seconds.append(time.perf_counter() - started)
            step_s, fits = self.judged(1 if counts_itself else count, k, place)
            found.append(step_s)
            over += not fits
        return Result(found, over, statistics.median(seconds))

    def _plan(self, count: int) -> Plan | None:
        if count not in self._plans:
            wanted = dataclasses.replace(self.plan, num_microbatches=count)
            self._plans[count] = holding(self._problem, wanted)
        return self._plans[count]


def ratios(peer: Sequence[float], ours: Sequence[float]) -> list[float]:
    """Paired, to six digits; what differs by rounding alone is 1."""
    found = [p / o for p, o in zip(peer, ours, strict=True)]
    return [1.0 if abs(r - 1) < SAME else round(r, 6) for r in found]


def best_count(results: dict[int, Result]) -> int:
    """The count that is fastest on these very batches, those that keep to the memory before all others."""
    return min(results, key=lambda m: (results[m].num_over_memory, results[m].mean_s))


def told(plan: Plan) -> dict[str, Any]:
    """A plan in few words, for the file."""
    degrees = {
        m.module: f"tp {m.parallel.tp} pp {m.parallel.pp} dp {m.parallel.dp}{' recompute' if m.recompute else ''}"
        for m in plan.modules
    }
    return {"layout": plan.layout, "num_microbatches": plan.num_microbatches, **degrees}
