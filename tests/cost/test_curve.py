import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.cost import curve
from dflop.records import CostTerms
from tests.builders import curves
from tests.cost.reference import cost_of_one_load

LOADS = st.tuples(st.integers(0, 500), st.integers(0, 100_000), st.integers(0, 10**10))


@given(curves(), st.lists(LOADS, min_size=1, max_size=20), st.integers(0, 40), st.booleans())
def test_vectorised_evaluation_equals_the_formula_on_every_load(terms, loads, num_layers, edge):
    found = curve.evaluate(terms, tuple(np.array(loads).T), num_layers, edge)
    expected = [cost_of_one_load(terms, *load, num_layers=num_layers, edge=edge) for load in loads]
    assert found == pytest.approx(np.array(expected), rel=1e-9, abs=1e-12)


@given(curves(), LOADS, LOADS, st.integers(0, 40), st.booleans())
def test_cost_never_falls_when_a_load_grows(terms, load, more, num_layers, edge):
    grown = tuple(a + b for a, b in zip(load, more, strict=True))
    before, after = (float(curve.evaluate(terms, x, num_layers, edge)) for x in (load, grown))
    assert after >= before - 1e-12


def test_slopes_and_knots_mean_what_they_say():
    terms = curve.from_slopes((3.0, 1.0, 2.0), (10, 30), CostTerms(1.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    tokens = np.array([10, 30, 31, 130])
    assert curve.evaluate(terms, (1, tokens, 0), 1, edge=False) == pytest.approx([31, 51, 53, 251])
    alike = curve.from_slopes((2.0, 2.0), (10,), curve.ZERO)
    assert alike == CostTerms(0.0, 2.0, 0.0, 0.0, 0.0, 0.0), "equal slopes leave no knot"


@given(curves(), st.integers(1, 1000), st.integers(1, 50_000))
def test_a_straightened_curve_rises_as_much_over_its_range(terms, low, width):
    high = low + width
    line = curve.straightened(terms, low, high)
    assert (line.layer_fixed, line.edge_fixed, line.layer_knots) == (0.0, 0.0, ())
    rises = [float(np.diff(curve.evaluate(t, (1, [low, high], 0), 1, edge=False))[0]) for t in (terms, line)]
    assert rises[1] == pytest.approx(rises[0], rel=1e-6, abs=1e-9)


@given(curves())
def test_without_a_known_range_the_slope_is_that_of_large_loads(terms):
    assert curve.straightened(terms, 0, 0).layer_per_token == terms.layer_per_token


@given(curves(), curves(), LOADS, st.floats(0, 3), st.floats(0, 3))
def test_sums_of_curves_are_sums_of_costs(first, second, load, a, b):
    both = curve.combine([(a, first), (b, second)])
    expected = a * curve.evaluate(first, load, 3, edge=True) + b * curve.evaluate(second, load, 3, edge=True)
    assert curve.evaluate(both, load, 3, edge=True) == pytest.approx(expected, rel=1e-9, abs=1e-12)
