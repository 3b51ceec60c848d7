import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.correct.estimate import Estimator, Prior
from tests.correct.times import EDGES, RIGHT, SHARED, StageTime, as_arrays, step_times

MIXED = [("vision", "llm"), ("llm",)]
"""Stages of an inline plan."""


def truth_with(**changes):
    truth = {module: factors.copy() for module, factors in RIGHT.items()}
    for module, (bucket, factor) in changes.items():
        truth[module][bucket] = factor
    return truth


def taught(estimator, truth, steps=15, *, seed=0, **how):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        estimator.observe(as_arrays(step_times(rng, truth, **how)))
    return estimator


def applied(estimator):
    factors = estimator.factors()
    return {found.module: np.array(found.factors) for found in factors.modules}, factors.by_node()


@pytest.mark.parametrize(("shared", "stages"), [((), None), (SHARED, MIXED)])
def test_a_size_that_is_mispredicted_is_found_and_others_are_left_alone(shared, stages):
    estimator = taught(
        Estimator(EDGES, shared), truth_with(llm=(3, 2.0), vision=(0, 0.6)), noise_frac=0.03, stages=stages
    )
    found, _ = applied(estimator)
    assert found["llm"][3] == pytest.approx(2.0, rel=0.05)
    assert found["vision"][0] == pytest.approx(0.6, rel=0.05)
    assert np.delete(found["llm"], 3) == pytest.approx(np.ones(5), abs=0.05)
    assert np.delete(found["vision"], 0) == pytest.approx(np.ones(3), abs=0.05)


@pytest.mark.parametrize(("shared", "stages"), [((), None), (SHARED, MIXED)])
def test_a_level_alone_gives_all_buckets_of_a_module_the_same_factor(shared, stages):
    estimator = taught(Estimator(EDGES, shared), {**RIGHT, "llm": 1.5 * RIGHT["llm"]}, stages=stages)
    found = estimator.factors().by_module()
    assert found["llm"].factors == pytest.approx([1.5] * 6, rel=0.03)
    assert found["llm"].level == pytest.approx(1.5, rel=0.03)
    assert found["vision"].level == 1.0
    assert estimator.node_beliefs() == {}, "with one rank per module all blame is the predictions'"


@given(st.integers(0, 1000), st.booleans())
@settings(max_examples=8, deadline=None)
def test_a_right_prediction_is_left_alone(seed, is_inline):
    """With little noise exactly; with more, by less than the noise of a microbatch."""
    shared, stages = (SHARED, MIXED) if is_inline else ((), None)
    for noise_frac, tolerance in ((0.0, 1e-12), (0.01, 1e-12), (0.05, 0.12)):
        estimator = Estimator(EDGES, shared)
        taught(estimator, RIGHT, 12, seed=seed, noise_frac=noise_frac, stages=stages, slowness=(1.0, 1.0))
        found, nodes = applied(estimator)
        for module, factors in found.items():
            assert factors == pytest.approx(RIGHT[module], abs=tolerance)
        assert not nodes
        assert all(m.level == 1.0 for m in estimator.factors().modules) or noise_frac > 0.02


def test_noise_gives_sizes_no_factors():
    num_by_size = 0
    for seed in range(3):
        estimator, rng = Estimator(EDGES), np.random.default_rng(seed)
        for _ in range(15):
            estimator.observe(as_arrays(step_times(rng, RIGHT, noise_frac=0.15, slowness=(1.0, 1.0))))
            num_by_size += sum(set(m.factors) != {m.level} for m in estimator.factors().modules)
    assert num_by_size <= 3, "of 90"


def test_a_slow_rank_and_a_slow_size_are_told_apart():
    for seed in range(3):
        estimator = Estimator(EDGES)
        slowness = (1.0, 1.5, 1.0, 1.0)
        taught(estimator, truth_with(llm=(3, 2.0)), seed=seed, noise_frac=0.05, slowness=slowness)
        found, nodes = applied(estimator)
        assert found["llm"][3] == pytest.approx(2.0, rel=0.1)
        assert np.delete(found["llm"], 3) == pytest.approx(np.ones(5), abs=0.1)
        assert nodes == {(m, s, 1): pytest.approx(1.5, rel=0.07) for m, s in (("vision", 0), ("llm", 1))}
        assert {node for node, b in estimator.node_beliefs().items() if b.is_slow} == set(nodes)


def test_a_slow_rank_of_an_inline_plan_is_told_from_a_slow_module():
    stages = [("vision", "llm"), ("llm",), ("llm",)]
    for slowness in ((1.0, 1.0), (1.0, 1.5)):
        estimator = Estimator(EDGES, SHARED)
        taught(estimator, {**RIGHT, "llm": 1.5 * RIGHT["llm"]}, noise_frac=0.03, slowness=slowness, stages=stages)
        assert estimator.beliefs()["llm"].level == pytest.approx(1.5, rel=0.05)
        assert estimator.beliefs()["vision"].level == pytest.approx(1.0, abs=0.05)
        slow = {("llm", stage, 1): pytest.approx(1.5, rel=0.07) for stage in range(3) if slowness[1] > 1}
        assert applied(estimator)[1] == slow


def test_a_straggling_microbatch_moves_no_factor():
    clean, hit = Estimator(EDGES), Estimator(EDGES)
    rng = np.random.default_rng(0)
    for step in range(10):
        times = list(step_times(rng, RIGHT, noise_frac=0.02, slowness=(1.0, 1.0)))
        clean.observe(as_arrays(times))
        straggler = times[step]
        times[step] = dataclasses.replace(straggler, measured_s=10 * straggler.measured_s)
        hit.observe(as_arrays(times))
        # Both halves of a step of 16 microbatches: every bucket of every module stays where it was.
        for module, belief in clean.beliefs().items():
            assert hit.beliefs()[module].factors == pytest.approx(belief.factors, abs=0.04)
            assert hit.factors().by_module()[module].level == 1.0
    assert applied(hit)[1] == {}


@pytest.mark.parametrize("shared", [(), SHARED])
def test_state_goes_through_json_and_both_go_on_alike(shared):
    truth = truth_with(llm=(2, 1.7))
    one, other = Estimator(EDGES, shared), Estimator(EDGES, shared)
    taught(one, truth, 8, noise_frac=0.05, slowness=(1.0, 1.4))
    other.load(json.loads(json.dumps(one.state())))
    assert other.state() == one.state()
    for estimator in (one, other):
        taught(estimator, truth, 8, seed=1, noise_frac=0.05, slowness=(1.0, 1.4))
    assert other.state() == one.state()
    assert other.factors() == one.factors()


def test_what_earlier_runs_learnt_counts_from_the_first_step_and_can_be_unlearnt():
    prior = {"llm": Prior(edges=(25,), factors=(1.0, 1.8), sd=(0.05, 0.05), level=1.3)}
    estimator = Estimator(EDGES, prior=prior)
    llm = estimator.factors().by_module()["llm"]
    assert llm.level == 1.3
    assert llm.factors == pytest.approx(
        [1.0, 1.0, 1.8, 1.8, 1.8, 1.8], rel=0.01
    )  # the third begins in the midst of ours
    assert estimator.factors().by_module()["vision"].factors == (1.0,) * 4
    taught(estimator, RIGHT, 8, noise_frac=0.03)
    assert applied(estimator)[0]["llm"] == pytest.approx(RIGHT["llm"], abs=0.06)


def test_nothing_is_learnt_from_what_is_no_time():
    estimator = Estimator(EDGES)
    before = json.dumps(estimator.state())
    work, node = {"llm": np.full(6, 0.1)}, ("llm", 0, 0)
    estimator.observe(as_arrays([]))
    estimator.observe(as_arrays([StageTime(node, seconds, work) for seconds in (0.0, math.nan, math.inf, -1.0)]))
    estimator.observe(as_arrays([StageTime(node, 1.0, {"llm": np.zeros(6)}), StageTime(node, 1.0, {})]))
    assert json.dumps(estimator.state()) == before
