"""Waiting for the slowest rank, by the costs of samples: of whole orders, and of a training in progress.

Ranks end a step together, so what one rank has less to do than the slowest is waiting. That is simulated: no machine is
slower than another, nothing overlaps, and time is what the costs say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop import units
from dflop.cost.model import Floats
from dflop.sampler.costs_of_samples import Ints, SampleCosts
from dflop.sampler.rank_plans import BatchPlan, Planner
from dflop.schedule.data_parallel import Sync

Dealt = tuple[Ints, Ints, Ints, int]
"""`[samples]` rows of the costs, slots and ranks of one global batch, and how many slots there are."""
NUM_EXPECTED = 32
"""Steps from which is said at the start what balancing should save."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """One order of samples."""

    order: str
    waiting_frac: float
    """1 - mean / longest of the ranks' times, mean over steps."""
    padding_frac: float
    """Of all work, what is done on padding."""
    step_cost: float
    """Mean over steps, in the unit of the costs."""
    num_steps: int


@dataclass(frozen=True, slots=True)
class Setting:
    """How a trainer cuts its data."""

    num_ranks: int
    batch_size: int
    """Samples of a global batch."""
    num_microbatches: int = 1
    padded: bool = False
    sync: Sync = "step"
    window: int | None = None
    """Global batches whose samples are sorted together; None: as many as transformers sorts."""


def waiting_of(order: str, steps: Sequence[Dealt], costs: SampleCosts, setting: Setting) -> Waiting:
    """Of the steps of an order."""
    fracs, longest, work, useful = [], [], 0.0, 0.0
    for rows, slot, rank, num_slots in steps:
        seconds = costs.seconds[rows]
        loads = _loads(seconds, slot, rank, num_slots, setting) + costs.fixed_s
        longest.append(float(loads.sum(axis=0).max() if setting.sync == "step" else loads.max(axis=1).sum()))
        fracs.append(1 - float(loads.sum()) / setting.num_ranks / longest[-1] if longest[-1] else 0.0)
        work, useful = work + float(loads.sum()), useful + float(seconds.sum()) + costs.fixed_s * loads.size
    padding = max(0.0, 1 - useful / work) if work else 0.0
    return Waiting(order, float(np.mean(fracs)), padding, float(np.mean(longest)), len(steps))


def dealt_by(plan: BatchPlan) -> Dealt:
    """As dflop deals a global batch."""
    return plan.rows, plan.dealt.slot, plan.dealt.rank, plan.dealt.num_microbatches


def in_turn(rows: Ints, setting: Setting) -> Dealt:
    """Equal counts, batches dealt to the ranks in turn, as Accelerate shards a loader."""
    bucket = np.arange(len(rows)) * setting.num_ranks * setting.num_microbatches // len(rows)
    return rows, bucket // setting.num_ranks, bucket % setting.num_ranks, setting.num_microbatches


class Gain:
    """What balancing saves a training, step by step: as dealt out, beside the same global batches dealt in turn."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._setting = Setting(
            planner.num_replicas, planner.cut.global_batch_size, planner.num_microbatches or 1, planner.padded,
            planner.sync,
        )  # fmt: skip
        self._plans: list[BatchPlan] = []
        self._sums, self._num_steps = np.zeros((2, 3)), 0

    def add(self, plan: BatchPlan) -> None:
        """A step that was trained."""
        self._plans.append(plan)

    def since_last(self) -> dict[str, float]:
        """Of the steps added since the last time, for a trainer's log; nothing where there are none."""
        if not self._plans:
            return {}
        found = self._of(self._plans)
        self._sums, self._num_steps = self._sums + found * len(self._plans), self._num_steps + len(self._plans)
        self._plans = []
        (waiting, padding, step), (_, _, step_in_turn) = found.tolist()
        metrics = {"dflop/waiting_frac": waiting, "dflop/estimated_speedup": step_in_turn / step if step else 1.0}
        return {**metrics, "dflop/padding_frac": padding} if self._setting.padded else metrics

    def expected(self, step: int) -> str:
        """What the next steps should save."""
        end = min(step + NUM_EXPECTED, self._planner.first_step(self._planner.place(step)[0] + 1))
        return self._words(self._of([self._planner.plan(k) for k in range(step, end)]))

    def saved(self) -> str:
        """Over all steps so far."""
        self.since_last()
        return f"{self._num_steps} steps: {self._words(self._sums / max(1, self._num_steps))}"

    def _of(self, plans: Sequence[BatchPlan]) -> Floats:
        """`[ours, in turn][waiting, padding, step]`."""
        both = ([dealt_by(plan) for plan in plans], [in_turn(plan.rows, self._setting) for plan in plans])
        found = [waiting_of("", steps, self._planner.costs, self._setting) for steps in both]
        return np.array([(of.waiting_frac, of.padding_frac, of.step_cost) for of in found])

    def _words(self, found: Floats) -> str:
        (waiting, padding, step), before = found.tolist()
        words = f"waiting {units.percent(before[0])} -> {units.percent(waiting)}"
        if self._setting.padded:
            words += f", padding {units.percent(before[1])} -> {units.percent(padding)}"
        return f"{words}, {units.ratio(before[2] / step if step else 1.0)} as fast as the same batches dealt in turn"


def _loads(seconds: Floats, slot: Ints, rank: Ints, num_slots: int, setting: Setting) -> Floats:
    """`[microbatches, ranks]`; padded, every sample of a microbatch costs what its dearest does."""
    bucket, num_buckets = slot * setting.num_ranks + rank, setting.num_ranks * num_slots
    loads: Floats = np.zeros(num_buckets)
    if setting.padded:
        np.maximum.at(loads, bucket, seconds)
        loads *= np.bincount(bucket, minlength=num_buckets)
    else:
        np.add.at(loads, bucket, seconds)
    return loads.reshape(num_slots, setting.num_ranks)
