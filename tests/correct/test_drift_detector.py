"""Drifts of costs and of shapes: silent for long while nothing changes, quick when something does."""

from statistics import NormalDist

import numpy as np
import pytest
from scipy.special import stdtrit

from dflop.correct.drift_detector import (
    NUM_RECENT,
    NUM_SD_SHIFT,
    CostDrift,
    Found,
    ShapeDrift,
    Usual,
    module_of,
    student_quantile,
    usual_of,
)
from dflop.correct.estimate import Estimator
from dflop.records import LLM, Factors, ModuleFactors
from tests.correct.times import StageTime, as_arrays

EDGES = {"vision": (64, 256, 1024), LLM: tuple(range(100, 1200, 100))}
NUM_MICROBATCHES, NOISE = 16, 0.05


class Machine:
    """Steps of two modules on ranks of their own, with factors that a test may change while it runs."""

    def __init__(self, seed: int, *, num_ranks: int = 2, noise: float = NOISE, is_inline: bool = False) -> None:
        self.rng, self.noise, self.num_ranks, self.is_inline = np.random.default_rng(seed), noise, num_ranks, is_inline
        self.factors = {m: np.ones(len(EDGES[m]) + 1) for m in EDGES}
        self.slow: dict[tuple[str, int, int], float] = {}

    def step(self) -> list[StageTime]:
        found = []
        for module in (LLM,) if self.is_inline else EDGES:
            for dp_rank in range(self.num_ranks):
                for _ in range(NUM_MICROBATCHES):
                    expected = {m: self.seconds(m) for m in (EDGES if self.is_inline else [module])}
                    true_s = sum(float(e @ self.factors[m]) for m, e in expected.items())
                    node = (module, 0, dp_rank)
                    measured_s = true_s * self.slow.get(node, 1.0) * np.exp(self.noise * self.rng.standard_normal())
                    found.append(StageTime(node, measured_s, expected))
        return found

    def seconds(self, module: str) -> np.ndarray:
        """A few items of random sizes: most buckets are empty in most microbatches."""
        num_buckets = len(EDGES[module]) + 1
        return self.rng.multinomial(8, np.full(num_buckets, 1 / num_buckets)) * self.rng.uniform(0.5, 1.5, num_buckets)


class Watch:
    """A drift detector behind the estimator that it hears from."""

    def __init__(self, shared=(), in_force: Factors | None = None) -> None:
        self.estimator, self.drift = Estimator(EDGES, shared), CostDrift(EDGES, in_force)

    def observe(self, times: list[StageTime]) -> list[Found]:
        self.estimator.observe(as_arrays(times))
        return self.drift.observe(self.estimator.beliefs())


def first(watch: Watch, machine: Machine, num_steps: int) -> tuple[int, Found] | None:
    """(steps until the first finding, it)."""
    for step in range(1, num_steps + 1):
        if found := watch.observe(machine.step()):
            return step, found[0]
    return None


def test_noise_of_five_per_cent_is_no_drift():
    assert first(Watch(), Machine(0), 300) is None


@pytest.mark.parametrize("is_inline", [False, True])
def test_a_module_that_slows_down_is_named_within_ten_steps(is_inline):
    machine = Machine(0, is_inline=is_inline)
    drift = Watch([tuple(EDGES)] if is_inline else [])
    assert first(drift, machine, 50) is None
    machine.factors["vision"] *= 1.3
    _, found = first(drift, machine, 10)
    assert (found.kind, found.subject, found.expected) == ("drift_cost", "vision", pytest.approx(1.0))
    assert found.measured == pytest.approx(1.3, rel=0.08)
    # What was found is taken for granted from now on.
    assert first(drift, machine, 100) is None


@pytest.mark.parametrize("factor", [1.3, 2.0])
def test_a_size_that_slows_down_is_named_within_ten_steps(factor):
    machine, drift = Machine(0), Watch()
    assert first(drift, machine, 50) is None
    machine.factors[LLM][3] *= factor
    _, found = first(drift, machine, 12 if factor < 2 else 6)
    assert found.subject == "llm of 300 to 399 tokens"
    assert module_of(found.subject) == LLM
    assert found.measured == pytest.approx(factor, rel=0.15)
    assert first(drift, machine, 100) is None


def test_what_is_in_force_already_is_no_drift():
    machine = Machine(1)
    machine.factors["vision"] *= 1.8
    machine.factors[LLM][:6] *= 1.5
    llm = ModuleFactors(LLM, 1.25, (600,), (1.5, 1.0))  # other buckets than the charts have
    in_force = Factors((ModuleFactors("vision", 1.8, (), (1.8,)), llm))
    assert first(Watch(in_force=in_force), machine, 300) is None
    _, found = first(Watch(), machine, 10)
    assert found.measured > 1.3


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_neither_slow_ranks_nor_stragglers_are_drifts(num_ranks):
    machine, drift = Machine(num_ranks, num_ranks=num_ranks), Watch()
    machine.slow[LLM, 0, 1] = 2.0
    for _ in range(200):
        times = machine.step()
        late = times[machine.rng.integers(len(times))]
        times.append(StageTime(late.node, 10 * late.measured_s, late.expected_s))
        assert drift.observe(times) == []


def batches(rng, num, *, media=1.0, evenness=20.0):
    """Seconds per module and shares per bucket of some global batches; of uneven ones few buckets have any."""
    for _ in range(num):
        seconds = {"vision": media * rng.normal(2.0, 0.2), LLM: rng.normal(5.0, 0.4)}
        yield seconds, {m: rng.dirichlet(np.full(len(EDGES[m]) + 1, evenness)) for m in EDGES}


def usual(rng, num=64, **kwargs) -> dict[str, Usual]:
    seen = list(batches(rng, num, **kwargs))
    return {m: usual_of(np.array([s[m] for s, _ in seen]), np.array([p[m] for _, p in seen])) for m in EDGES}


def test_more_media_are_noticed_and_then_taken_for_granted():
    rng = np.random.default_rng(0)
    drift = ShapeDrift(EDGES, usual(rng))
    assert not any(drift.observe(*batch) for batch in batches(rng, 3000)), "like those planned for"
    wild = {"vision": 1000.0, LLM: 0.0}, {LLM: np.eye(12)[0]}
    assert not any(drift.observe(*batch) for batch in [wild, *batches(rng, 20)]), "a single step"
    found = [f for batch in batches(rng, 40, media=2.0) for f in drift.observe(*batch)]
    assert [(f.kind, f.subject) for f in found] == [("drift_shapes", "vision")]
    assert found[0].measured == pytest.approx(4.0, rel=0.1)
    assert found[0].expected == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("num_batches", [3, 10, 32])
def test_batches_of_few_samples_differ_and_that_is_no_drift(num_batches):
    """Each has work in some buckets alone, and others than those few batches that the plan was made for."""
    false_alarms = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        drift = ShapeDrift(EDGES, usual(rng, num_batches, evenness=0.2))
        false_alarms += any(drift.observe(*batch) for batch in batches(rng, 100, evenness=0.2))
    assert false_alarms <= 1


@pytest.mark.parametrize(("degrees", "error"), [(7, 0.04), (15, 0.01), (39, 0.001)])
def test_quantiles_are_students(degrees, error):
    exact = -stdtrit(degrees, NormalDist().cdf(-NUM_SD_SHIFT))
    assert student_quantile(np.array([degrees])) == pytest.approx([exact], rel=error)


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
    usual_ = {m: Usual(0.0, 0.0, np.zeros(len(EDGES[m]) + 1), np.zeros(len(EDGES[m]) + 1), 8) for m in EDGES}
    usual_[LLM] = Usual(5.0, 0.2, usual_[LLM].shares, usual_[LLM].share_sds, 8)
    drift = ShapeDrift(EDGES, usual_)
    for _ in range(10):
        assert drift.observe({LLM: 5.0}, {}) == []
    found = [f for _ in range(NUM_RECENT) for f in drift.observe({LLM: 5.0, "vision": 3.0}, {})]
    assert [(f.subject, f.measured, f.expected) for f in found] == [("vision", pytest.approx(3.0), 0.0)]
