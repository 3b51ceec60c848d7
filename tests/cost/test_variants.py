import dataclasses

import numpy as np
import pytest

from dflop.cost import curve
from dflop.cost.fit import MIN_OWN_PROBES, fit_cost_tables
from dflop.cost.model import CostModel
from dflop.errors import CostError
from dflop.records import CostTable, CostTerms, Measurement
from tests.builders import make_probe, make_specs, make_table, random_loads

SPECS = make_specs()
BENT = CostTerms(1e-4, 1e-8, 1e-13, 1e-4, 2e-8, 1e-6, (500.0, 4000.0), (2e-8, -5e-9))
TRAINED = dataclasses.replace(
    make_table("llm"), forward_s=BENT, backward_s=curve.combine([(2.1, BENT)]), optimizer_s_per_param=0.0
)
RECOMPUTING = dataclasses.replace(
    TRAINED,
    recompute=True,
    backward_s=curve.combine([(1.0, TRAINED.backward_s), (1.0, TRAINED.forward_s)]),
    activation_bytes=CostTerms(0.0, 2e3, 0.0, 0.0, 1e4, 0.0),
)
FROZEN = dataclasses.replace(
    TRAINED,
    trains="none",
    forward_s=curve.combine([(0.95, TRAINED.forward_s)]),
    backward_s=curve.combine([(0.5, TRAINED.backward_s)]),
    activation_bytes=CostTerms(0.0, 6e3, 0.0, 0.0, 2e3, 0.0),
)


def probes_of(truth: CostTable, num_groups: int, seed: int = 0) -> list[Measurement]:
    return [make_probe(truth, d, *load) for load in random_loads(num_groups, seed=seed) for d in (1, 2)]


@pytest.mark.parametrize("truth", [RECOMPUTING, FROZEN], ids=["recomputing", "frozen"])
def test_four_probes_and_the_trained_table_give_a_variant(truth):
    trained, variant = fit_cost_tables([*probes_of(TRAINED, 60), *(probes_of(truth, 2, seed=7))], SPECS)
    assert (variant.is_frozen, variant.recompute) == (truth.is_frozen, truth.recompute)
    assert (variant.num_measurements, variant.table_id != trained.table_id) == (4, True)
    found, true = (CostModel([t], extrapolate=True) for t in (variant, truth))
    loads = np.array(random_loads(30, seed=3)).T
    args = {"num_layers": 4, "edge": True, "mode": truth.mode}
    seconds, wanted_s = (np.array(m.module_seconds("llm", loads, **args)) for m in (found, true))
    assert seconds == pytest.approx(wanted_s, rel=0.05)
    kept, wanted = (m.activation_bytes("llm", loads, **args) for m in (found, true))
    assert kept == pytest.approx(wanted, rel=1e-3)
    assert variant.p95_error_frac < 0.05


def test_many_probes_are_a_fit_of_their_own():
    probes = probes_of(FROZEN, MIN_OWN_PROBES)
    alone = fit_cost_tables(probes, SPECS)[0]
    _, beside = fit_cost_tables([*probes_of(TRAINED, 20), *probes], SPECS)
    assert beside == alone


def test_a_module_only_ever_frozen_needs_no_trained_table():
    frozen, recomputing = fit_cost_tables(
        [*probes_of(FROZEN, 20), *probes_of(dataclasses.replace(FROZEN, recompute=True), 2)], SPECS
    )
    assert (frozen.is_frozen, frozen.recompute) == (True, False)
    assert (recomputing.is_frozen, recomputing.recompute) == (True, True)


def test_too_few_probes_of_a_variant_are_named():
    three = probes_of(RECOMPUTING, 2)[:3]
    with pytest.raises(CostError, match=r"3 probe\(s\) of 2 size\(s\).*`llm` when recomputing"):
        fit_cost_tables([*probes_of(TRAINED, 20), *three], SPECS)


def test_recomputing_keeps_the_optimizer_and_frozen_weights_have_none():
    stepped = [dataclasses.replace(m, optimizer_s=2e-9 * m.param_bytes / 4) for m in probes_of(TRAINED, 20)]
    by_way = {
        (t.is_frozen, t.recompute): t
        for t in fit_cost_tables([*stepped, *probes_of(RECOMPUTING, 2), *probes_of(FROZEN, 2)], SPECS)
    }
    assert by_way[False, True].optimizer_s_per_param == pytest.approx(2e-9)
    assert by_way[True, False].optimizer_s_per_param == 0.0
