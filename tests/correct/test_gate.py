from __future__ import annotations

import json
import math

import numpy as np

from dflop.correct.gate import Gate


def read(gate, gains, cost_frac=0.0):
    """Whether the gate is on after each reading."""
    found = []
    for gain in gains:
        before = gate.is_on
        assert gate.read(float(gain), cost_frac) == (gate.is_on != before)
        found.append(gate.is_on)
    return np.array(found)


def test_noise_without_gain_is_on_for_a_small_share_of_the_time():
    for seed in range(2):
        on = read(Gate(), np.random.default_rng(seed).normal(0.0, 0.01, 10_000))
        assert on.mean() < 0.1
    # As plans without misprediction are: seldom different, and then worse.
    rng = np.random.default_rng(9)
    assert not read(Gate(), np.where(rng.random(10_000) < 0.3, -rng.exponential(0.005, 10_000), 0.0)).any()


def test_a_large_gain_switches_on_at_once_and_its_end_off():
    for seed in range(8):
        rng, gate = np.random.default_rng(seed), Gate()
        on = read(gate, rng.normal(0.3, 0.05, 20))
        assert on.argmax() < 4
        assert on[4:].all()
        off = read(gate, rng.normal(0.0, 0.002, 60))
        assert not off[-10:].any()


def test_a_single_reading_switches_nothing_and_a_small_steady_gain_takes_four():
    assert not read(Gate(), [0.5]).any()
    assert read(Gate(), [0.02, 0.021, 0.019, 0.02, 0.02]).tolist() == [False, False, False, True, True]
    assert read(Gate(is_on=True), [0.0] * 4).tolist() == [True, True, True, False]


def test_what_correcting_costs_has_to_be_earned():
    rng = np.random.default_rng(0)
    assert not read(Gate(), rng.normal(0.02, 0.001, 200), cost_frac=0.05).any()
    assert read(Gate(), rng.normal(0.02, 0.001, 200), cost_frac=0.01)[-1]


def test_it_does_not_switch_back_and_forth_between_its_two_thresholds():
    gate = Gate()
    read(gate, [0.02] * 10)
    assert read(gate, [0.002] * 200).all()  # less than would turn it on, more than turns it off
    assert not read(Gate(), [0.002] * 200).any()


def test_what_is_not_a_number_is_no_reading():
    gate = Gate()
    assert not gate.read(math.nan, 0.0)
    assert not gate.read(-math.inf, 0.0)
    assert gate.num_readings == 0
    assert gate.stderr_frac == math.inf


def test_state_goes_through_json():
    gate, other = Gate(), Gate()
    rng = np.random.default_rng(1)
    read(gate, rng.normal(0.01, 0.02, 30))
    other.load(json.loads(json.dumps(gate.state())))
    assert other.state() == gate.state()
    later = rng.normal(0.01, 0.02, 50)
    assert read(other, later).tolist() == read(gate, later).tolist()
