import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize

from dflop.cost.fit import fit_cost_tables, missing_probes
from dflop.cost.model import CostModel
from dflop.errors import CostError
from dflop.records import Measurement
from tests.builders import make_probe, make_specs, make_table
from tests.gpu.nnls import nnls

SPECS = make_specs()
TRUTH = dataclasses.replace(make_table("llm"), profile_key="p", hardware="cpu")
GROUPS = [(1, 64, 64**2), (4, 400, 50_000), (8, 900, 110_000), (2, 1500, 1_200_000), (16, 2000, 300_000)]


def probes(noise_frac: float = 0.0) -> list[Measurement]:
    rng = np.random.default_rng(0)
    return [
        make_probe(TRUTH, layers, *group, noise=float(rng.normal(1.0, noise_frac)))
        for layers in (1, 2)
        for group in GROUPS
    ]


def test_exact_probes_give_back_every_coefficient():
    (table,) = fit_cost_tables(probes(), SPECS)
    for phase in ("forward_s", "backward_s"):
        fitted, true = (dataclasses.asdict(getattr(t, phase)) for t in (table, TRUTH))
        assert (fitted.pop("layer_knots"), fitted.pop("layer_bends")) == ((), ())
        assert fitted == pytest.approx({name: true[name] for name in fitted}, rel=1e-6, abs=1e-12)
    assert table.activation_bytes.layer_per_token == pytest.approx(1e4, rel=1e-3)
    assert (table.layer_param_bytes, table.edge_param_bytes) == (TRUTH.layer_param_bytes, TRUTH.edge_param_bytes)
    assert table.p95_error_frac < 1e-9
    assert table.num_measurements == 10


def test_noisy_probes_extrapolate_to_full_depth():
    (table,) = fit_cost_tables(probes(noise_frac=0.02), SPECS)
    load = (6, 1200, 300_000)
    predicted = sum(CostModel([table]).module_seconds("llm", load, num_layers=24, edge=True))
    true = sum(CostModel([TRUTH]).module_seconds("llm", load, num_layers=24, edge=True))
    assert predicted == pytest.approx(true, rel=0.1)
    assert 0 < table.median_error_frac < 0.05
    (wild,) = fit_cost_tables(probes(noise_frac=0.3), SPECS)
    for terms in (wild.forward_s, wild.backward_s):
        assert min(dataclasses.astuple(terms)[:6]) >= 0


def test_fixed_size_items_are_accepted_and_predicted():
    windows = [make_probe(TRUTH, layers, n, 100 * n, 100**2 * n) for layers in (1, 2) for n in (1, 2, 5)]
    (table,) = fit_cost_tables(windows, SPECS)
    predicted = sum(CostModel([table]).module_seconds("llm", (8, 800, 80000), num_layers=4, edge=True))
    true = sum(CostModel([TRUTH]).module_seconds("llm", (8, 800, 80000), num_layers=4, edge=True))
    assert predicted == pytest.approx(true, rel=1e-6)


def test_table_id_depends_on_content_alone():
    measurements = probes()
    first, shuffled = (fit_cost_tables(ms, SPECS)[0] for ms in (measurements, measurements[::-1]))
    assert first == shuffled
    slower = [dataclasses.replace(m, forward_s=2 * m.forward_s) for m in measurements]
    assert fit_cost_tables(slower, SPECS)[0].table_id != first.table_id
    other = [dataclasses.replace(m, hardware="gpu") for m in measurements]
    assert [t.hardware for t in fit_cost_tables([*measurements, *other], SPECS)] == ["cpu", "gpu"]


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (lambda m: m.num_layers == 1, r"two depths \(have \[1\]\)"),
        (lambda m: m.num_tokens == 64, r"two token counts \(have \[64\]\)"),
        (lambda m: m.num_tokens in (64, 400), r"6 probes \(have 4\)"),
    ],
)
def test_missing_probes_are_named(keep, message):
    with pytest.raises(CostError, match=message):
        fit_cost_tables([m for m in probes() if keep(m)], SPECS)


@given(st.lists(st.tuples(st.sampled_from(probes()), st.booleans(), st.booleans()), min_size=1, max_size=24))
def test_nothing_is_missing_exactly_where_tables_can_be_fitted(drawn):
    """Of probes of two ways, some of which ran out of memory."""
    found = [dataclasses.replace(m, is_frozen=way, status="oom" if lost else "ok") for m, way, lost in drawn]
    missing = missing_probes(found, {(m.recompute, m.is_frozen) for m in found})
    with pytest.raises(CostError) if missing else nullcontext():
        fit_cost_tables(found, SPECS)


def test_depth_and_size_that_vary_together_are_refused():
    tied = [m for m in probes() if (m.num_layers == 1) == (m.num_tokens == 64)]
    tied += [tied[0]] * 3
    with pytest.raises(CostError, match="each depth"):
        fit_cost_tables([m for m in tied if m.num_tokens in (64, 400)] * 3, SPECS)


def test_unmeasured_modules_and_unknown_names_are_named():
    with pytest.raises(CostError, match="no measurement of module `vision`"):
        fit_cost_tables(probes(), make_specs("vision"))
    with pytest.raises(CostError, match="unknown module `visoin`"):
        fit_cost_tables([dataclasses.replace(probes()[0], module="visoin")], make_specs("vision"))
    with pytest.raises(CostError, match="unknown dtype `int3`"):  # needed to count parameters
        fit_cost_tables([dataclasses.replace(m, dtype="int3", optimizer_s=1.0) for m in probes()], SPECS)


def test_range_noise_and_optimizer_come_from_the_probes():
    timed = [dataclasses.replace(m, optimizer_s=1e-9 * m.param_bytes / 4) for m in probes()]
    timed = [dataclasses.replace(m, forward_spread_s=0.03 * (m.forward_s + m.backward_s)) for m in timed]
    (table,) = fit_cost_tables(timed, SPECS)
    assert (table.min_tokens, table.max_tokens, table.max_mean_length) == (64, 2000, 800.0)
    assert table.noise_frac == pytest.approx(0.03)
    assert table.optimizer_s_per_param == pytest.approx(1e-9)


def oom(num_layers: int, items: int, tokens: int, sum_sq: int) -> Measurement:
    lost = make_probe(TRUTH, num_layers, items, tokens, sum_sq)
    return dataclasses.replace(lost, forward_s=0.0, backward_s=0.0, activation_bytes=0, status="oom")


def test_what_did_not_fit_ends_the_range_and_changes_nothing_else():
    (without,) = fit_cost_tables(probes(), SPECS)
    (table,) = fit_cost_tables([*probes(), oom(2, 4, 1800, 400_000), oom(2, 4, 9000, 100_000)], SPECS)
    assert table.forward_s == without.forward_s
    assert table.num_measurements == without.num_measurements
    # 1800 tokens did not fit although 2000 did: the length was at fault.
    assert (table.max_tokens, table.max_mean_length) == (2000, pytest.approx(400_000 / 1800))
    shallow = [m for m in probes() if m.num_layers == 1 or m.num_tokens < 1800]
    (bounded,) = fit_cost_tables([*shallow, oom(2, 4, 1800, 400_000)], SPECS)
    assert (bounded.max_tokens, bounded.max_mean_length) == (1800, 800.0)


@given(st.integers(0, 10_000), st.integers(1, 8))
def test_least_squares_of_machines_without_scipy_are_scipys(seed, num_columns):
    rng = np.random.default_rng(seed)
    features, target = rng.exponential(size=(20, num_columns)), rng.normal(1, 2, 20)
    (found, norm), (want, want_norm) = nnls(features, target), optimize.nnls(features, target)
    np.testing.assert_allclose(found, want, atol=1e-8)
    assert norm == pytest.approx(want_norm)
