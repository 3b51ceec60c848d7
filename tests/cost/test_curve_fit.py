"""Curves through probes of a layer whose cost is smooth and not a line."""

import dataclasses

import numpy as np

from dflop.cost.fit import fit_cost_tables
from dflop.cost.model import CostModel
from dflop.records import CostTable, Measurement
from tests.builders import make_probe, make_specs, make_table, random_loads

SPECS = make_specs()
BASE = make_table("llm")


def smooth_s(num_tokens: float) -> float:
    """Forward seconds of a layer: flat below some 300 tokens, linear above, steeper from 6000 on."""
    return 2e-8 * np.hypot(num_tokens, 300.0) + 4e-9 * max(num_tokens - 6000.0, 0.0)


def smooth_probes(num_groups: int, noise_frac: float = 0.0, outlier_frac: float = 0.0) -> list[Measurement]:
    rng = np.random.default_rng(num_groups)
    found = []
    for load in random_loads(num_groups, seed=num_groups):
        for depth in (1, 2):
            straight = make_probe(flat(), depth, *load)
            curved_s = depth * smooth_s(load[1])
            noise = rng.lognormal(0.0, noise_frac, 2) * (rng.uniform(2, 5) if rng.random() < outlier_frac else 1.0)
            found.append(
                dataclasses.replace(
                    straight,
                    forward_s=float(noise[0] * (straight.forward_s + curved_s)),
                    backward_s=float(noise[1] * (straight.backward_s + 2 * curved_s)),
                )
            )
    return found


def flat() -> CostTable:
    """What the smooth layer costs beside its curve."""
    return make_table("llm", fixed_s=3e-5, per_token_s=0.0, per_sq_token_s=1e-12, edge_per_token_s=1.5e-8)


def tail_error(table: CostTable) -> float:
    """95th percentile of the error of whole modules of four layers, on loads no probe had."""
    true, found = CostModel([flat()]), CostModel([table], extrapolate=True)
    errors = []
    for load in random_loads(300, seed=99):
        seconds = [sum(m.module_seconds("llm", load, num_layers=4, edge=True)) for m in (true, found)]
        errors.append(abs(float(seconds[1]) / (float(seconds[0]) + 12 * smooth_s(load[1])) - 1))
    return float(np.quantile(errors, 0.95))


def test_a_curve_is_found_and_predicts_what_was_not_probed():
    (table,) = fit_cost_tables(smooth_probes(100, noise_frac=0.01), SPECS)
    assert 1 <= len(table.forward_s.layer_knots) <= 4
    assert table.forward_s.layer_knots == table.backward_s.layer_knots
    assert tail_error(table) < 0.02
    assert 0.002 < table.median_error_frac < 0.015


def test_a_line_needs_no_knots():
    exact = [make_probe(BASE, depth, *load) for load in random_loads(40) for depth in (1, 2)]
    assert fit_cost_tables(exact, SPECS)[0].forward_s.layer_knots == ()
    rng = np.random.default_rng(5)
    noisy = [dataclasses.replace(m, forward_s=m.forward_s * rng.lognormal(0, 0.02)) for m in exact]
    assert len(fit_cost_tables(noisy, SPECS)[0].forward_s.layer_knots) <= 1


def test_outliers_do_not_bend_the_curve():
    clean, spoilt = (fit_cost_tables(smooth_probes(100, 0.01, frac), SPECS)[0] for frac in (0.0, 0.08))
    assert tail_error(spoilt) < tail_error(clean) + 0.03
    assert spoilt.median_error_frac < 0.02
    assert spoilt.p95_error_frac > 0.3  # the outliers themselves are told, not hidden


def test_stated_errors_are_of_groups_the_fit_did_not_see():
    """A group alone at its size, far from all others: only a fit that saw it would predict it."""
    probes = [make_probe(BASE, depth, *load) for load in random_loads(12) for depth in (1, 2)]
    odd = [make_probe(BASE, depth, 3, 60_000, 1_200_000_000, noise=2.0) for depth in (1, 2)]
    (table,) = fit_cost_tables([*probes, *odd], SPECS)
    assert table.p95_error_frac > 0.3
