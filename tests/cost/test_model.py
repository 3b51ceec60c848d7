from __future__ import annotations

import numpy as np
import pytest

from dflop.cost.model import CostModel
from dflop.errors import CostError
from dflop.records import ModuleLoad
from tests.builders import make_cost, make_plan, make_table


def test_seconds_are_layers_plus_edge():
    cost = make_cost()
    bare, _ = cost.module_seconds("llm", 2, 100, 6000, num_layers=3, edge=False)
    whole, backward = cost.module_seconds("llm", 2, 100, 6000, num_layers=3, edge=True)
    assert bare == pytest.approx(3 * (1e-3 + 100e-5 + 6000e-9))
    assert whole == pytest.approx(float(bare) + 1e-3 + 100e-5)
    assert backward == pytest.approx(2 * float(whole))


def test_arrays_equal_scalars_and_empty_is_free():
    cost = make_cost("vision")
    tokens = np.array([[0, 10], [200, 3000]])
    forward, backward = cost.module_seconds("vision", tokens > 0, tokens, tokens**2, num_layers=2, edge=True)
    for index, n in np.ndenumerate(tokens):
        one = cost.module_seconds("vision", n > 0, n, n**2, num_layers=2, edge=True)
        assert (forward[index], backward[index]) == one
    assert forward[0, 0] == backward[0, 0] == 0


def test_item_seconds_add_up_to_the_microbatch_without_its_fixed_cost():
    cost = make_cost()
    lengths = np.array([10, 200, 33])
    items = cost.item_seconds("llm", 1, lengths, lengths**2, num_layers=4, edge=True)
    whole = sum(cost.module_seconds("llm", 3, lengths.sum(), (lengths**2).sum(), num_layers=4, edge=True))
    assert whole - items.sum() == pytest.approx(3 * (4 * 1e-3 + 1e-3))


def test_corrections_scale_seconds_not_bytes():
    cost = make_cost("vision")
    slower = cost.with_corrections({"llm": 1.5})
    args = ("llm", 1, 100, 10_000)
    for plain, corrected in zip(
        cost.module_seconds(*args, num_layers=2, edge=True),
        slower.module_seconds(*args, num_layers=2, edge=True),
        strict=True,
    ):
        assert corrected == pytest.approx(1.5 * plain)
    assert slower.activation_bytes(*args, num_layers=2, edge=True) == cost.activation_bytes(
        *args, num_layers=2, edge=True
    )
    vision = ("vision", 1, 100, 10_000)
    assert slower.item_seconds(*vision, num_layers=2, edge=True) == cost.item_seconds(*vision, num_layers=2, edge=True)


def test_stages_of_a_module_share_its_cost_and_the_last_pays_the_edge():
    cost, llm = make_cost(), make_plan({"llm": 1}, llm_pp=2).module("llm")
    load = ModuleLoad(2, 300, 50_000)
    stages = [cost.stage_seconds(llm, stage, load) for stage in range(2)]
    whole = cost.module_seconds("llm", 2, 300, 50_000, num_layers=4, edge=True)
    assert np.sum(stages, axis=0) == pytest.approx(np.array(whole))
    bare = cost.module_seconds("llm", 2, 300, 50_000, num_layers=llm.layers_per_stage[0], edge=False)
    assert stages[0] == pytest.approx([float(part) for part in bare])
    assert cost.param_bytes("llm", 3, edge=True) == 20_000_000


def test_unknown_module_and_tp_list_what_exists():
    cost = CostModel([make_table("llm", tp=1), make_table("llm", tp=2)])
    with pytest.raises(CostError, match="valid: llm"):
        cost.table("lmm")
    with pytest.raises(CostError, match="have tp 1, 2"):
        cost.table("llm", tp=4)
    with pytest.raises(CostError, match="no cost table for module `audio`"):
        cost.with_corrections({"audio": 1.1})


def test_two_tables_for_one_module_are_refused():
    with pytest.raises(CostError, match="two cost tables for module `llm` at tp 1"):
        CostModel([make_table("llm"), make_table("llm", fixed_s=1.0)])
