"""Costs of a module whose adapters train: those of the frozen one, and what the adapters add."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflop.cost.model import CostModel
from dflop.cost.tensor_parallel import DERIVED
from dflop.records import LLM, TRAINS_ADAPTERS, TRAINS_NONE, RunMode
from tests.builders import make_specs, make_table, with_layers

SHARE = 0.01
TRAINED = make_table(LLM, activation_bytes_per_token=1e4)
AGAIN = make_table(LLM, recompute=True, activation_bytes_per_token=128.0)
FROZEN = replace(
    TRAINED, table_id="frozen", trains=TRAINS_NONE, backward_s=TRAINED.forward_s,
    activation_bytes=replace(TRAINED.activation_bytes, layer_per_token=8e3, edge_per_token=5e3),
)  # fmt: skip


def cost_of(*tables, frozen=(), values=-500, inputs=200):
    (spec,) = make_specs()
    adapters = ((6000, 4000),)
    spec = with_layers(spec, adapters=adapters, num_adapter_values=values, num_adapter_inputs=inputs)
    return CostModel(tables, frozen=frozen, adapted=(LLM,), specs=(spec,), extrapolate=True)


def seconds(terms):
    return terms.layer_per_token, terms.edge_per_token


def test_a_backward_pass_is_that_of_a_frozen_llm_and_what_adapters_add():
    cost = cost_of(TRAINED, FROZEN, AGAIN)
    table = cost.table(LLM)
    assert (table.trains, table.source) == (TRAINS_ADAPTERS, DERIVED)
    layer, edge = seconds(TRAINED.forward_s)
    assert seconds(table.forward_s) == pytest.approx((layer * (1 + SHARE), edge))
    assert seconds(table.backward_s) == pytest.approx((layer * (1 + 2 * SHARE), edge))
    again = cost.table(LLM, RunMode(recompute=True))
    assert seconds(again.backward_s) == pytest.approx((layer * (2 + 2 * SHARE), edge)), "forward runs once more"
    assert again.activation_bytes == AGAIN.activation_bytes
    assert table.table_id not in {TRAINED.table_id, FROZEN.table_id, again.table_id}


def test_without_a_frozen_table_a_backward_pass_costs_no_less_than_that_of_weights():
    table = cost_of(TRAINED).table(LLM)
    assert seconds(table.backward_s)[0] == pytest.approx(seconds(TRAINED.backward_s)[0] + 2 * SHARE * 1e-5)


@pytest.mark.parametrize(("values", "inputs", "kept"), [(-100, 200, 8e3 + 800), (28, 900, 1e4 + 112)])
def test_layers_keep_the_least_that_trained_and_frozen_ones_allow(values, inputs, kept):
    table = cost_of(TRAINED, FROZEN, values=values, inputs=inputs).table(LLM)
    assert (table.activation_bytes.layer_per_token, table.activation_bytes.edge_per_token) == (kept, 5e3)


def test_where_the_module_is_frozen_its_adapters_are_too():
    assert cost_of(TRAINED, FROZEN, frozen=(LLM,)).table(LLM) == FROZEN


def test_a_job_reads_the_table_back_as_it_was_planned_with():
    table = cost_of(TRAINED, FROZEN).table(LLM)
    assert CostModel([table]).table(LLM) == table
