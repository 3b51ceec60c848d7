"""Drifts of costs and of shapes: silent for long while nothing changes, quick when something does."""

from __future__ import annotations

import numpy as np
import pytest

from dflop.correct.drift_detector import CostDrift, Found, ShapeDrift, Usual, module_of, usual_of
from dflop.correct.estimate import Estimator
from dflop.records import LLM, Factors, ModuleFactors
from tests.correct.times import StageTime, rows_of, step_times

EDGES = {"vision": (64, 256, 1024), LLM: tuple(range(100, 1200, 100))}
RIGHT = {module: np.ones(len(edges) + 1) for module, edges in EDGES.items()}
BOTH = ("vision", LLM)


class Job:
    """What the estimator makes of steps whose truth a test may change, and what of that counts as a drift."""

    def __init__(
        self, seed: int, *, num_ranks: int = 2, is_inline: bool = False, in_force: Factors | None = None
    ) -> None:
        self.rng, self.slowness, self.stages = np.random.default_rng(seed), [1.0] * num_ranks, None
        if is_inline:
            self.stages = [BOTH, (LLM,)]
        self.truth = {module: factors.copy() for module, factors in RIGHT.items()}
        self.estimator = Estimator(EDGES, [BOTH] if is_inline else ())
        self.drift = CostDrift(in_force or self.estimator.factors(shapes=True, nodes=False))

    def times(self) -> list[StageTime]:
        how = {"slowness": self.slowness, "stages": self.stages}
        return list(step_times(self.rng, self.truth, noise_frac=0.05, **how))

    def observe(self, times: list[StageTime]) -> list[Found]:
        self.estimator.observe(rows_of(times))
        return self.drift.observe(self.estimator.beliefs())

    def first(self, num_steps: int) -> Found | None:
        return next((found[0] for _ in range(num_steps) if (found := self.observe(self.times()))), None)


@pytest.mark.parametrize("is_inline", [False, True])
def test_noise_of_five_per_cent_is_no_drift(is_inline):
    assert Job(0, is_inline=is_inline).first(400) is None


@pytest.mark.parametrize("is_inline", [False, True])
def test_a_module_that_slows_down_is_named_within_ten_steps(is_inline):
    job = Job(0, is_inline=is_inline)
    assert job.first(50) is None
    job.truth["vision"] *= 1.3
    found = job.first(10)
    assert (found.kind, found.subject, found.expected) == ("drift_cost", "vision", 1.0)
    assert found.measured == pytest.approx(1.3, rel=0.08)
    # What was found is taken for granted from now on.
    assert job.first(100) is None


@pytest.mark.parametrize("factor", [1.4, 2.0])
def test_a_size_that_slows_down_is_named_within_ten_steps(factor):
    job = Job(0)
    assert job.first(50) is None
    job.truth[LLM][3] *= factor
    found = job.first(12 if factor < 2 else 10)
    assert found.subject == "llm of 300 to 399 tokens"
    assert module_of(found.subject) == LLM
    assert found.measured == pytest.approx(factor, rel=0.15)
    assert job.first(100) is None


def test_what_is_in_force_already_is_no_drift():
    llm = ModuleFactors(LLM, 1.25, EDGES[LLM], (1.5,) * 6 + (1.0,) * 6)
    in_force = Factors((ModuleFactors("vision", 1.8, EDGES["vision"], (1.8,) * 4), llm))
    for known, is_drift in ((in_force, False), (None, True)):
        job = Job(1, in_force=known)
        job.truth = {m.module: np.array(m.factors) for m in in_force.modules}
        assert (job.first(100) is not None) == is_drift


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_neither_slow_ranks_nor_stragglers_are_drifts(num_ranks):
    job = Job(num_ranks, num_ranks=num_ranks)
    job.slowness[1] = 2.0
    for _ in range(200):
        times = job.times()
        late = times[job.rng.integers(len(times))]
        assert job.observe([*times, StageTime(late.node, 10 * late.measured_s, late.expected_s)]) == []


def batches(rng, num, *, media=1.0):
    """Seconds per module and shares per bucket of some global batches."""
    for _ in range(num):
        seconds = {"vision": media * rng.normal(2.0, 0.2), LLM: rng.normal(5.0, 0.4)}
        yield seconds, {m: rng.dirichlet(np.full(len(EDGES[m]) + 1, 20.0)) for m in EDGES}


def usual(rng) -> dict[str, Usual]:
    seen = list(batches(rng, 64))
    return {m: usual_of(np.array([s[m] for s, _ in seen]), np.array([p[m] for _, p in seen])) for m in EDGES}


def test_more_media_are_noticed_and_then_taken_for_granted():
    rng = np.random.default_rng(0)
    drift = ShapeDrift(EDGES, usual(rng))
    assert not any(drift.observe(*batch) for batch in batches(rng, 3000)), "like those planned for"
    found = [f for batch in batches(rng, 40, media=2.0) for f in drift.observe(*batch)]
    assert [(f.kind, f.subject) for f in found] == [("drift_shapes", "vision")]
    assert found[0].measured == pytest.approx(4.0, rel=0.1)
    assert found[0].expected == pytest.approx(2.0, rel=0.1)


def test_a_single_wild_batch_is_no_alarm_and_five_are():
    rng = np.random.default_rng(0)
    drift, wild_steps = ShapeDrift(EDGES, usual(rng)), {1, *range(20, 25)}
    told = [drift.observe(*next(batches(rng, 1, media=100.0 if step in wild_steps else 1.0))) for step in range(26)]
    assert [step for step, found in enumerate(told) if found] == [24]


def test_other_sizes_in_the_same_seconds_are_noticed():
    rng = np.random.default_rng(5)
    drift = ShapeDrift(EDGES, usual(rng))
    found = []
    for seconds, shares in batches(rng, 40):
        longer = 0.7 * shares[LLM]
        longer[-1] += 0.3
        found += drift.observe(seconds, shares | {LLM: longer})
    assert found[0].subject == "llm from 1100 tokens on"
    assert found[0].measured > 0.25


def test_work_for_a_module_that_had_none_is_noticed():
    usual_ = {m: Usual(0.0, 0.0, np.zeros(len(EDGES[m]) + 1), np.zeros(len(EDGES[m]) + 1)) for m in EDGES}
    usual_[LLM] = Usual(5.0, 0.2, usual_[LLM].shares, usual_[LLM].share_sds)
    drift = ShapeDrift(EDGES, usual_)
    for _ in range(10):
        assert drift.observe({LLM: 5.0}, {}) == []
    found = [f for _ in range(8) for f in drift.observe({LLM: 5.0, "vision": 3.0}, {})]
    assert [(f.subject, f.measured, f.expected) for f in found] == [("vision", pytest.approx(3.0), 0.0)]
