import dataclasses

import pytest

from dflop.cost.model import CostModel
from dflop.errors import CostError
from dflop.records import CostTerms, RunMode
from tests.builders import make_link, make_specs, make_table, with_layers

SPEC = dataclasses.replace(with_layers(make_specs()[-1], num_params=50_000), tp_choices=(1, 2, 4))
BENT = CostTerms(1e-3, 1e-6, 1e-9, 2e-3, 3e-6, 4e-6, (100.0,), (9e-6,))
TABLE = make_table("llm", forward_s=BENT, backward_s=BENT)


def test_work_is_divided_and_launches_are_not():
    cost = CostModel([TABLE], specs=[SPEC])
    derived = cost.table("llm", RunMode(4))
    speedup = 4
    assert (derived.source, derived.tp) == ("derived", 4)
    assert derived.table_id not in (TABLE.table_id, cost.table("llm", RunMode(2)).table_id)
    names = ("layer_fixed", "layer_per_token", "layer_per_sq_token", "edge_fixed", "edge_per_token", "edge_per_item")
    expected = (1e-3, 1e-6 / speedup, 1e-9 / speedup, 2e-3, 3e-6 / speedup, 4e-6 / speedup)
    assert [getattr(derived.forward_s, name) for name in names] == pytest.approx(expected)
    assert derived.forward_s.layer_bends == pytest.approx((9e-6 / speedup,))
    assert (derived.layer_param_bytes, derived.edge_param_bytes) == (1_000_000, TABLE.edge_param_bytes)


def test_the_edge_of_an_encoder_stays_whole():
    vision = dataclasses.replace(SPEC, module="vision")
    derived = CostModel([dataclasses.replace(TABLE, module="vision")], specs=[vision]).table("vision", RunMode(4))
    assert (derived.forward_s.edge_per_token, derived.forward_s.edge_per_item) == (3e-6, 4e-6)
    assert derived.activation_bytes.edge_per_token == TABLE.activation_bytes.edge_per_token


def test_two_all_reduces_per_layer_and_pass_are_added_where_a_link_is_known():
    link = make_link("all_reduce", 2, 1, 1e-5, 1e9)
    recomputing = dataclasses.replace(TABLE, recompute=True)
    plain, linked = (CostModel([TABLE, recomputing], specs=[SPEC], links=x) for x in ((), (link,)))
    part = {"num_layers": 5, "edge": True}
    hidden_s, numbers_s = (1e-5 + 300 * size / 1e9 for size in (64 * 4, 3 * 4))
    for recompute, num_backward in ((False, 3), (True, 5)):
        asked = "llm", (1, 300, 0), RunMode(2, recompute=recompute)
        with_link, without = linked.module_seconds(*asked, **part), plain.module_seconds(*asked, **part)
        at_ends_s = 300 * 64 * 4 / 1e9 / 2
        assert with_link[0] - without[0] == pytest.approx(5 * 2 * hidden_s + 2 * numbers_s + at_ends_s)
        assert with_link[1] - without[1] == pytest.approx((5 * num_backward + 1) * hidden_s + at_ends_s)


@pytest.mark.parametrize("module", ["llm", "vision"])
def test_ranks_share_what_layers_keep(module):
    cost = CostModel([dataclasses.replace(TABLE, module=module)], specs=[dataclasses.replace(SPEC, module=module)])
    whole, halved = (
        float(cost.activation_bytes(module, (1, 100, 0), RunMode(tp), num_layers=1, edge=False)) for tp in (1, 2)
    )
    assert halved == pytest.approx(whole / 2)


def test_a_measured_table_comes_first_and_nothing_is_derived_without_a_spec_or_from_a_higher_degree():
    measured = make_table("llm", tp=2)
    cost = CostModel([TABLE, measured], specs=[SPEC])
    assert cost.table("llm", RunMode(2)) is measured
    assert cost.tps("llm") == (1, 2, 4)
    assert CostModel([TABLE]).tps("llm") == (1,)
    split_only = CostModel([measured], specs=[SPEC])
    assert split_only.tps("llm") == (2,)
    with pytest.raises(CostError, match="at tp 4; have tp 2"):
        split_only.table("llm", RunMode(4))
