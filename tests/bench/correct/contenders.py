"""Ways of learning from stage times, obvious ones beside ours; each plans a step with what it knows and then learns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dflop.correct.estimate import Estimator
from dflop.correct.gate import Gate
from dflop.correct.times import StageTime, StepTimes
from dflop.cost.model import Floats
from dflop.records import LLM, Factors
from dflop.schedule.items import Ints
from tests.bench.correct.balance import balanced, height_s
from tests.bench.correct.worlds import MODULES, Batch, World

SMOOTHING = 0.15
Times = Sequence[tuple[int, StageTime]]
"""(slot, time) of one step."""


class Contender(Protocol):
    """Knows the world's buckets and ranks; sees only times."""

    is_on: bool
    """Whether its plans depend on factors by size or by rank."""

    def plan(self, batch: Batch) -> Ints:
        """Slot of every sample of the next step."""

    def learn(self, times: Times) -> None:
        """From the step that was planned last."""


class Uncorrected:
    """Believes the prediction."""

    is_on = False

    def __init__(self, world: World, num_slots: int, num_ranks: int) -> None:
        self._num_slots, self._slowness = num_slots, np.ones(num_ranks)
        self._factors = {m: np.ones(len(world.edges[m]) + 1) for m in MODULES}

    def plan(self, batch: Batch) -> Ints:
        return balanced(batch.weights_s(self._factors), batch.tokens[LLM], self._num_slots, self._slowness)

    def learn(self, times: Times) -> None:
        pass


class ModuleAverage(Uncorrected):
    """One factor per module: exponential average of a step's median log ratio, dead zone 3 %."""

    def __init__(self, world: World, num_slots: int, num_ranks: int) -> None:
        super().__init__(world, num_slots, num_ranks)
        self._log, self._num_steps = dict.fromkeys(MODULES, 0.0), 0

    def learn(self, times: Times) -> None:
        self._num_steps += 1
        for m in MODULES:
            logs = [math.log(t.measured_s / t.expected_s[m].sum()) for _, t in times if m in t.expected_s]
            self._log[m] += max(1 / (self._num_steps + 1), SMOOTHING) * (statistics.median(logs) - self._log[m])
            if abs(self._log[m] - math.log(self._factors[m][0])) > math.log1p(0.03):
                self._factors[m][:] = math.exp(self._log[m])


class BucketAverage(Uncorrected):
    """A factor per bucket: exponential average of the ratios of the microbatches it was in, by its share of them."""

    is_on = True

    def learn(self, times: Times) -> None:
        for m in MODULES:
            seen = [t for _, t in times if m in t.expected_s]
            parts = np.array([t.expected_s[m] for t in seen]) * self._factors[m]
            ratio = np.array([t.measured_s for t in seen]) / parts.sum(axis=1)
            share = (parts.T / parts.sum(axis=1)).T
            weight = share.sum(axis=0)
            seen_ratio = np.where(weight > 0, ratio @ share / np.where(weight > 0, weight, 1.0), 1.0)
            self._factors[m] *= 1 + SMOOTHING * (seen_ratio - 1)


class Filtered:
    """The estimator, its factors always applied."""

    is_on = True

    def __init__(self, world: World, num_slots: int, num_ranks: int) -> None:
        self._num_slots, self._num_ranks = num_slots, num_ranks
        self._estimator = Estimator(world.edges)

    def plan(self, batch: Batch) -> Ints:
        return self._planned(batch, self._estimator.factors(True, True))

    def learn(self, times: Times) -> None:
        self._estimator.observe(StepTimes.of(time for _, time in times))

    def _planned(self, batch: Batch, factors: Factors) -> Ints:
        return balanced(*self._costs(batch, factors)[:1], batch.tokens[LLM], self._num_slots, self._slow(factors))

    def _costs(self, batch: Batch, factors: Factors) -> tuple[Floats, Floats]:
        found = factors.by_module()
        return batch.weights_s({m: np.array(found[m].factors) for m in MODULES}), self._slow(factors)

    def _slow(self, factors: Factors) -> Floats:
        nodes = factors.by_node()
        return np.array([nodes.get((LLM, 0, rank), 1.0) for rank in range(self._num_ranks)])


class Gated(Filtered):
    """The estimator behind its gate: two more of it, each on half of the microbatches, read what factors gain."""

    def __init__(self, world: World, num_slots: int, num_ranks: int) -> None:
        super().__init__(world, num_slots, num_ranks)
        self._halves = Estimator(world.edges), Estimator(world.edges)
        self._gate, self._num_steps = Gate(), 0

    @property
    def is_on(self) -> bool:  # type: ignore[override]  # a property where the gate has a field
        return self._gate.is_on

    def plan(self, batch: Batch) -> Ints:
        if self._num_steps:
            self._gate.read(self._gain_frac(batch), cost_frac=0.0)
        return self._planned(batch, self._estimator.factors(self.is_on, True))

    def learn(self, times: Times) -> None:
        super().learn(times)
        for parity, half in enumerate(self._halves):
            mine = (t for slot, t in times if (slot // self._num_ranks + self._num_steps) % 2 == parity)
            half.observe(StepTimes.of(mine))
        self._num_steps += 1

    def _gain_frac(self, batch: Batch) -> float:
        """Of a plan by the factors of one half, under those of the other."""
        maker, judge = self._halves if self._num_steps % 2 else self._halves[::-1]
        costs = self._costs(batch, judge.factors(True, True))
        plain = height_s(costs[0], self._planned(batch, maker.factors(False, True)), self._num_slots, costs[1])
        found = height_s(costs[0], self._planned(batch, maker.factors(True, True)), self._num_slots, costs[1])
        return 1 - found / plain


CONTENDERS = {
    "none": Uncorrected,
    "module average": ModuleAverage,
    "bucket average": BucketAverage,
    "ours, no gate": Filtered,
    "ours": Gated,
}
