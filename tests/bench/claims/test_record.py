"""Verdicts and texts follow from the figures, and change with them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tests.bench.claims.record import (
    IN_PART,
    MISSED,
    REACHED,
    UNKNOWN,
    WITHIN_SPREAD,
    Claim,
    Expectation,
    Reading,
    by_seed,
    geometric_mean,
    shown,
)


def reading(*values, unit="x"):
    return Reading("gain", values, unit, "simulated")


def claim(*expectations):
    return Claim("name", "claim", "how", "paper", tuple(e.reading for e in expectations), expectations)


def test_a_reading_tells_its_spread():
    assert reading(1.5).text == "gain: 1.50x"
    assert reading(1.5, 1.7, 1.6).text == "gain: 1.60x (1.50x to 1.70x)"
    assert reading().text == "gain: none"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(1.234, "x", "1.23x"), (0.021, "%", "2.1 %"), (0.84, "%", "84 %"), (-0.0012, "%", "-0.12 %"),
     (379.4, "s", "379 s"), (1205.2, "s", "1205 s"), (math.nan, "x", "none"), (5, "", "5")],
)  # fmt: skip
def test_values_for_people(value, unit, text):
    assert shown(value, unit) == text


def test_a_bound_is_met_by_the_mean_and_missed_by_seeds():
    met = Expectation(reading(1.3, 1.4), ">=", 1.2, "reason")
    assert (met.is_met, met.num_met, met.shortfall) == (True, 2, "")
    spread = Expectation(reading(1.1, 1.4), ">=", 1.2, "reason")
    assert (spread.is_met, spread.num_met) == (True, 1)
    assert spread.shortfall == "gain: 1.25x (1.10x to 1.40x), wanted at least 1.20x: missed with 1 of 2 seeds"
    short = Expectation(reading(1.1, 1.1), ">=", 1.2, "reason")
    assert short.shortfall == "gain: 1.10x (1.10x to 1.10x), wanted at least 1.20x: reason"
    below = Expectation(reading(0.03, unit="%"), "<=", 0.021, "reason")
    assert below.shortfall == "gain: 3 %, wanted at most 2.1 %: reason"
    assert not Expectation(reading(0.02, unit="%"), "<=", 0.021, "reason").shortfall
    assert Expectation(reading(), ">=", 1.0, "no plan").shortfall == "gain: nothing was found; no plan"


def test_verdicts():
    good, spread, bad = (Expectation(reading(*v), ">=", 1.2, "why") for v in ((1.3, 1.4), (1.1, 1.4), (1.0, 1.1)))
    assert claim(good).verdict == REACHED
    assert claim(good).worse == ""
    assert claim(good, spread).verdict == WITHIN_SPREAD
    assert claim(good, bad).verdict == IN_PART
    assert claim(bad).verdict == MISSED
    assert claim(spread, bad).worse == f"{spread.shortfall}; {bad.shortfall}"
    assert claim(Expectation(reading(), ">=", 1.0, "why")).verdict == UNKNOWN


def test_json_holds_verdict_and_tests():
    content = claim(Expectation(reading(1.0, 1.1), ">=", 1.2, "why")).to_json()
    assert content["verdict"] == MISSED
    assert content["ours"] == ["gain: 1.05x (1.00x to 1.10x)"]
    assert content["expectations"] == [
        {"reading": "gain", "relation": ">=", "bound": 1.2, "reason": "why", "is_met": False, "num_met": 0}
    ]


def test_geometric_means_by_seed():
    assert by_seed([(1, 2.0), (0, 3.0), (1, 8.0)]) == pytest.approx((3.0, 4.0))
    assert math.isnan(geometric_mean([]))


def test_what_is_kept_is_json():
    claim = Claim(
        "name", "claim", "how", "paper", (reading(1.0),), (), details=({"gain": math.nan, "of": (1, math.inf)},)
    )
    assert json.loads(json.dumps(claim.to_json(), allow_nan=False))["details"] == [{"gain": None, "of": [1, None]}]


def test_a_claim_in_figures_of_numpys_can_be_written():
    reading = Reading("gain", tuple(np.array([1.2, 1.3])), "x", "simulated")
    found = Claim(
        "throughput", "", "", "", (reading,), (Expectation(reading, ">=", 1.25, "it is not"),),
        details=({"num_over": np.int64(3), "gain": np.float64("nan"), "fits": np.bool_(True)},),
    ).to_json()  # fmt: skip
    told = json.loads(json.dumps(found, allow_nan=False))
    assert told["details"] == [{"num_over": 3, "gain": None, "fits": True}]
    assert (told["expectations"][0]["num_met"], told["expectations"][0]["is_met"]) == (1, True)
