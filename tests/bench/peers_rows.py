"""What peers make of one cell: batchers on dflop's plan and on the tuned uniform one, and that plan itself.

Batchers decide which samples of a global batch share a microbatch.
"""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np
from transformers.trainer_pt_utils import BatchRebalanceSampler

from dflop.cost.model import Floats
from dflop.plan.baselines.uniform import tuned_uniform
from dflop.plan.drafts import holding
from dflop.plan.rank import arrival_step_s
from dflop.plan.search import plan_problem
from dflop.plan.space import Problem
from dflop.records import LLM, Plan, SampleShape
from dflop.schedule.assignment import Assignment, even_item_ranks
from dflop.schedule.items import Ints, module_items
from dflop.schedule.linear import sample_weights
from dflop.schedule.policies import QUICK, Effort, StepJob

COUNTS = (2, 4, 8, 16, 32, 64)
"""Numbers of microbatches that planners and batchers may choose from."""
SAME = 1e-9
"""Relative difference below which two step times are equal."""
SAMPLER = "BatchRebalanceSampler"
KARMARKAR_KARP = "re-expressed: Karmarkar and Karp 1982 on "
Batches = Sequence[Sequence[SampleShape]]
Row = dict[str, Any]
"""One peer in one cell. `kind`: `batch` or `plan`. `on`: whose plan, `dflop` or `uniform`; of planners the scheduler,
`dflop`. `ratio`: its seconds over dflop's on the same global batches."""


@dataclass(frozen=True)
class Batcher:
    """One peer."""

    name: str
    origin: str
    """Its package with version, or what it is re-expressed from."""
    decide: Callable[[StepJob], Assignment]


def batchers() -> list[Batcher]:
    """All of them."""
    return [
        Batcher(
            "arrival order", "samples counted into microbatches as they come",
            lambda job: job.assign("arrival", Effort()),
        ),
        Batcher(
            "LPT on tokens", "re-expressed: Graham 1969 on the language model's tokens",
            lambda job: job.assign("token_lpt", Effort()),
        ),
        Batcher(
            "balance of all modules", "longest first on the worst module, without the search on the simulator",
            lambda job: job.assign("bottleneck", Effort()),
        ),
        Batcher(
            "Karmarkar-Karp, tokens", KARMARKAR_KARP + "the language model's tokens",
            lambda job: differenced(job, tokens_of(job).astype(np.float64)),
        ),
        Batcher(
            "Karmarkar-Karp, our seconds", KARMARKAR_KARP + "all modules' seconds",
            lambda job: differenced(job, sample_weights(job.linear).sum(axis=1)),
        ),
        Batcher("batch rebalance", f"package transformers {version('transformers')}, {SAMPLER}", _rebalanced),
    ]  # fmt: skip


def tokens_of(job: StepJob) -> Ints:
    return job.items[LLM].num_tokens


def evenly(job: StepJob, slot: Ints, rank: Ints) -> Assignment:
    """Media items go to an encoder's ranks by equal counts, as in trainers that do not look at them."""
    items, num_slots = {}, job.plan.num_microbatches
    for e in job.plan.encoders:
        of, inline = job.items[e.module], job.plan.is_inline
        items[e.module] = rank[of.sample_of] if inline else even_item_ranks(of, slot, num_slots, e.parallel.dp)
    return Assignment(slot, rank, items)


def _rebalanced(job: StepJob) -> Assignment:
    """transformers' BatchRebalanceSampler, the global batch kept; every rank works all of it out again."""
    lengths, num_slots, num_ranks = tokens_of(job).tolist(), job.plan.num_microbatches, job.plan.module(LLM).parallel.dp
    slot, rank = np.zeros((2, len(lengths)), dtype=np.int64)
    sampler = BatchRebalanceSampler(lengths, len(lengths), num_ranks, num_slots, shuffle=False, drop_last=True)
    for r, microbatches in enumerate(sampler._assign(list(range(len(lengths))), lengths)):
        for k, members in enumerate(microbatches):
            slot[members], rank[members] = k, r
    return evenly(job, slot, rank)


def differenced(job: StepJob, cost: Floats) -> Assignment:
    """Buckets of a slot side by side, as the reference numbers them."""
    bucket, num_ranks = differencing(cost, job.num_buckets), job.plan.module(LLM).parallel.dp
    return evenly(job, bucket // num_ranks, bucket % num_ranks)


def differencing(cost: Floats, num_buckets: int) -> Ints:
    """Largest differencing (Karmarkar and Karp) of scalar costs over m buckets.

    Every sample starts as a partition, m groups of which one is loaded. The two partitions that spread most become one,
    the heaviest group of the first with the lightest of the second, until one is left.
    """
    heap: list[tuple[float, int, Floats, list[list[int]]]] = []
    for i, seconds in enumerate(cost.tolist()):
        sums = np.zeros(num_buckets)
        sums[0] = seconds
        heap.append((-seconds, i, sums, [[i], *([] for _ in range(num_buckets - 1))]))
    heapq.heapify(heap)
    serial = len(cost)
    while len(heap) > 1:
        (_, _, a, groups_a), (_, _, b, groups_b) = heapq.heappop(heap), heapq.heappop(heap)
        sums = a + b[::-1]  # a descends, b's order is turned
        groups = [x + y for x, y in zip(groups_a, reversed(groups_b), strict=True)]
        order = np.argsort(-sums, kind="stable")
        serial += 1
        heapq.heappush(heap, (float(sums[order[-1]] - sums[order[0]]), serial, sums[order], [groups[k] for k in order]))
    bucket = np.empty(len(cost), dtype=np.int64)
    for b, group in enumerate(heap[0][3]):
        bucket[group] = b
    return bucket


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
        """Of a number of microbatches that the layout has memory for."""
        if (count, batch) not in self._jobs:
            plan = self._plan(count)
            assert plan is not None, f"no memory for {count} microbatches"
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

    def run(self, count: int, peer: Batcher) -> Result:
        """A batcher on all batches."""
        found = Result()
        for k in range(len(self.batches)):
            job = self.job(count, k)
            _ = job.linear  # costs are there when our own search begins, too
            began_s = time.perf_counter()
            assignment = peer.decide(job)
            decide_s = time.perf_counter() - began_s
            found.add(job.judge.step_s(assignment) + self.plan.sync_s, job.keeps_caps(assignment), decide_s)
        return found

    def _plan(self, count: int) -> Plan | None:
        if count not in self._plans:
            self._plans[count] = holding(self._problem, dataclasses.replace(self.plan, num_microbatches=count))
        return self._plans[count]


def best_count(results: Mapping[int, Result]) -> int:
    """The count that is fastest on these very batches, those that keep to the memory before all others."""
    return min(results, key=lambda m: (results[m].num_over_memory, np.mean(results[m].step_s)))


def rows_of(problem: Problem, unseen: Batches) -> Iterator[Row]:
    """Every peer on global batches nobody planned for."""
    began_s = time.perf_counter()
    board = Board(problem, plan_problem(problem)[0], unseen)
    plan_s = time.perf_counter() - began_s
    ours = board.dflop()
    yield from _batch_rows("dflop", board, ours, ours)
    began_s = time.perf_counter()
    uniform = tuned_uniform(problem, lambda plan: arrival_step_s(problem, plan))
    uniform_s = time.perf_counter() - began_s
    if uniform is None:
        return
    board = Board(problem, uniform, unseen)
    base = board.dflop()
    origin = (
        "re-expressed: every uniform (tp, pp, dp) and count, as Megatron-LM lays models out; tuned in arrival order"
    )
    row = dataclasses.replace(base, decide_s=[uniform_s]).row("plan", "planner: uniform", origin, "plan's", ours.step_s)
    yield row | {"on": "dflop", "dflop_decide_s": plan_s}
    # A count chosen as peers choose theirs, by quick looks at these very batches.
    own = board.dflop(best_count({m: board.dflop(m, QUICK) for m in board.counts()}))
    yield from _batch_rows("uniform", board, base, own)


def _batch_rows(on: str, board: Board, base: Result, ours: Result) -> Iterator[Row]:
    """Every batcher with the number of microbatches that suits it best."""
    for peer in batchers():
        results = {m: board.run(m, peer) for m in board.counts()}
        row = results[best_count(results)].row("batch", peer.name, peer.origin, "own", ours.step_s)
        yield row | {"on": on, "dflop_decide_s": float(np.median(base.decide_s))}
