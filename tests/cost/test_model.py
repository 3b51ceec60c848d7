from dataclasses import replace

import numpy as np
import pytest

from dflop.cost.curve import ZERO
from dflop.cost.model import CostModel
from dflop.errors import CostError
from dflop.records import LLM, CostTerms, ModuleFactors, ModuleLoad, RunMode
from tests.builders import make_cost, make_link, make_plan, make_specs, make_table, with_layers


def test_seconds_are_layers_plus_edge():
    cost = make_cost()
    bare, _ = cost.module_seconds("llm", (2, 100, 6000), num_layers=3, edge=False)
    whole, backward = cost.module_seconds("llm", (2, 100, 6000), num_layers=3, edge=True)
    assert bare == pytest.approx(3 * (1e-3 + 100e-5 + 6000e-9))
    assert whole == pytest.approx(float(bare) + 1e-3 + 100e-5)
    assert backward == pytest.approx(2 * float(whole))


def test_item_seconds_add_up_to_the_microbatch_without_its_fixed_cost():
    cost = make_cost()
    lengths = np.array([10, 200, 33])
    items = cost.item_seconds("llm", (1, lengths, lengths**2), num_layers=4, edge=True)
    whole = sum(cost.module_seconds("llm", (3, lengths.sum(), (lengths**2).sum()), num_layers=4, edge=True))
    assert whole - items.sum() == pytest.approx(3 * (4 * 1e-3 + 1e-3))


def test_corrections_scale_seconds_not_bytes():
    cost, key = make_cost("vision"), {"num_layers": 2, "edge": True}
    slower, load = cost.with_corrections({"llm": 1.5}), (1, 100, 10_000)
    plain, corrected = (np.array(c.module_seconds("llm", load, **key)) for c in (cost, slower))
    assert corrected == pytest.approx(1.5 * plain)
    assert slower.activation_bytes("llm", load, **key) == cost.activation_bytes("llm", load, **key)
    assert slower.item_seconds("vision", load, **key) == cost.item_seconds("vision", load, **key)


def test_stages_of_a_module_share_its_cost_and_the_last_pays_the_edge():
    cost, llm = make_cost(), make_plan({"llm": 1}, llm_pp=2).module("llm")
    load = ModuleLoad(2, 300, 50_000)
    stages = [cost.stage_seconds(llm, stage, load) for stage in range(2)]
    whole = cost.module_seconds("llm", (2, 300, 50000), num_layers=4, edge=True)
    assert np.sum(stages, axis=0) == pytest.approx(np.array(whole))
    bare = cost.module_seconds("llm", (2, 300, 50000), num_layers=llm.layers_per_stage[0], edge=False)
    assert stages[0] == pytest.approx([float(part) for part in bare])


def test_microbatches_may_differ_in_how_many_layers_run_again():
    spec = with_layers(make_specs()[0], num_kv_heads=2)
    again = make_table(LLM, per_token_s=3e-5, edge_per_token_s=7e-5, recompute=True)
    cost = CostModel([make_table(LLM), again], specs=[spec], links=[make_link("p2p", 2, 1, 1e-5, 1e9)])
    tokens, shares = np.array([0.0, 300.0, 4000.0, 4000.0]), np.array([0.5, 0.0, 0.25, 0.75])
    key = {"num_layers": 4, "edge": True}
    found = np.array(cost.module_seconds(LLM, (8, tokens, tokens * 300), RunMode(cp=2, recompute=shares), **key))
    for k, share in enumerate(shares.tolist()):
        alone = cost.module_seconds(LLM, (8, tokens[k], tokens[k] * 300), RunMode(cp=2, recompute=share), **key)
        assert found[:, k] == pytest.approx(np.array(alone))


def test_unknown_module_and_tp_list_what_exists_and_nothing_may_be_there_twice():
    cost = CostModel([make_table("llm", tp=1), make_table("llm", tp=2)])
    with pytest.raises(CostError, match="valid: llm"):
        cost.table("lmm")
    with pytest.raises(CostError, match="have tp 1, 2"):
        cost.table("llm", RunMode(4))
    with pytest.raises(CostError, match="no cost table for module `audio`"):
        cost.with_corrections({"audio": 1.1})
    with pytest.raises(CostError, match="2 factors for 3 buckets"):
        cost.with_corrections({"llm": ModuleFactors("llm", 1.0, (100, 200), (1.0, 2.0))})
    with pytest.raises(CostError, match="two cost tables for module `llm` at tp 1"):
        CostModel([make_table("llm"), make_table("llm", fixed_s=1.0)])


def test_item_seconds_use_the_mean_slope_so_that_loads_add():
    bent = CostTerms(1e-3, 1e-6, 0.0, 0.0, 0.0, 0.0, (100.0,), (9e-6,))
    cost = CostModel([make_table("llm", forward_s=bent, min_tokens=50, max_tokens=250)])
    lengths = np.array([10, 200, 33])
    items = cost.item_seconds("llm", (1, lengths, lengths**2), num_layers=1, edge=False)
    whole = cost.item_seconds("llm", (3, lengths.sum(), (lengths**2).sum()), num_layers=1, edge=False)
    assert float(whole) == pytest.approx(items.sum())
    forward_only = CostModel([make_table("llm", forward_s=bent, backward_s=ZERO, min_tokens=50, max_tokens=250)])
    added = forward_only.item_seconds("llm", (1, [200], 0), num_layers=1, edge=False)
    assert added[0] == pytest.approx(200 * (1e-6 + 9e-6 * 50 / 200))


PROBED = make_table("llm", min_tokens=100, max_tokens=1000, max_mean_length=200.0)


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ((1, [500, 2001], 100), "`llm` asked for 2001 tokens; probed: 100 to 1000 tokens"),
        ((1, 1000, [100, 400_001]), "`llm` asked for a mean length of 400 tokens; probed: mean lengths up to 200"),
    ],
)
def test_loads_far_beyond_the_probes_are_refused(load, words):
    cost = CostModel([PROBED])
    for ask in (cost.module_seconds, cost.item_seconds, cost.activation_bytes):
        with pytest.raises(CostError, match=words) as caught:
            ask("llm", load, num_layers=1, edge=True)
        assert "extrapolate=True" in caught.value.hint
        getattr(cost.extrapolating(), ask.__name__)("llm", load, num_layers=1, edge=True)
    CostModel([PROBED], max_extrapolation=3.0).module_seconds("llm", load, num_layers=1, edge=True)


def test_up_to_twice_the_probes_is_answered():
    at_the_limit = (1, [2000, 0, 1], [2000 * 400, 0, 400])
    for cost in (CostModel([PROBED]), CostModel([PROBED], extrapolate=True)):
        seconds, _ = cost.module_seconds("llm", at_the_limit, num_layers=1, edge=True)
        assert seconds[0] > seconds[2] > seconds[1] == 0.0


def test_a_table_that_knows_no_range_refuses_nothing():
    make_cost().module_seconds("llm", (1, 10**9, 10**12), num_layers=1, edge=True)


def test_recomputation_has_tables_of_its_own():
    recomputing = make_table("llm", per_token_s=3e-5, recompute=True)
    cost, load = CostModel([make_table("llm"), recomputing]), (1, 100, 0)
    modes, part = [RunMode(), RunMode(recompute=True)], {"num_layers": 1, "edge": False}
    times = [float(cost.module_seconds("llm", load, mode, **part)[0]) for mode in modes]
    assert times == pytest.approx([1e-3 + 100e-5, 1e-3 + 300e-5])
    assert cost.tps("llm") == (1,)
    with pytest.raises(CostError, match="no cost table for module `llm` with recomputation"):
        make_cost().activation_bytes("llm", load, modes[1], **part)


def test_frozen_modules_take_their_frozen_tables():
    tables = [
        make_table(m, trains="none" if f else "all", table_id=f"{m}-{f}")
        for m in ("llm", "vision")
        for f in (False, True)
    ]
    cost = CostModel(tables, frozen=("vision",))
    assert [t.table_id for t in cost.tables] == ["llm-False", "vision-True"]
    assert CostModel(tables[:3], frozen=("vision", "llm")).table("vision").table_id == "vision-False"
    assert [t.table_id for t in CostModel(tables).tables] == ["llm-False", "vision-False"]
    assert CostModel(tables[1:]).table("llm").table_id == "llm-True"
    with pytest.raises(CostError, match="no cost table for module `llm`"):
        CostModel(tables[1:], frozen=()).table("llm")


BY_SIZE = ModuleFactors("llm", level=1.5, edges=(100, 200), factors=(1.0, 2.0, 4.0))


def test_items_are_corrected_by_their_size_and_mixes_by_the_level():
    plain = make_cost("vision")
    cost = plain.with_corrections({"llm": BY_SIZE, "vision": 3.0})
    tokens, key = np.array([0, 99, 100, 199, 200, 9999]), {"num_layers": 2, "edge": True}
    times = [1, 1, 2, 2, 4, 4]
    assert cost.item_factors("llm", tokens).tolist() == times
    assert cost.item_factors("vision", tokens).tolist() == [3.0] * 6
    loads = ("llm", (1, tokens, tokens**2))
    assert cost.item_seconds(*loads, **key) == pytest.approx(plain.item_seconds(*loads, **key) * times)
    given = np.arange(6.0)
    for factor, expected in ((None, 1.5), (given, given), (1.0, 1.0)):
        for found, uncorrected in zip(
            cost.module_seconds(*loads, **key, factor=factor), plain.module_seconds(*loads, **key), strict=True
        ):
            assert found == pytest.approx(expected * uncorrected)
    several = cost.item_seconds("llm", (9, 450, 450**2), **key, factor=1.5)
    assert several == pytest.approx(1.5 * plain.item_seconds("llm", (9, 450, 450**2), **key))

    uncorrected = cost.uncorrected()
    assert uncorrected.item_seconds(*loads, **key).tolist() == plain.item_seconds(*loads, **key).tolist()
    assert (cost.level("llm"), cost.is_by_size("llm")) == (1.5, True)
    assert (uncorrected.level("llm"), uncorrected.is_by_size("llm")) == (1.0, False)


def test_ranks_that_share_samples_take_their_part_and_exchange_keys_and_values():
    spec = with_layers(make_specs()[0], num_kv_heads=2)
    links = [make_link("p2p", 2, 1, 1e-5, 1e9)]
    cost = CostModel([make_table(LLM), make_table(LLM, recompute=True)], specs=[spec], links=links, extrapolate=True)
    tokens, sum_sq = 4000.0, 4000.0 * 600
    key = {"num_layers": 3, "edge": True}
    shared, part = (
        np.array(cost.module_seconds(LLM, (n, t, s), RunMode(cp=cp), **key))
        for n, t, s, cp in ((80, tokens, sum_sq, 4), (20, tokens / 4, sum_sq / 4, 1))
    )
    # Of a sample that is cut 600 tokens, keys and values of 32 numbers of 4 bytes each.
    exchange_s = 1e-5 + 600 * 2 * 32 * 4 / 1e9
    assert shared - part == pytest.approx(3 * exchange_s)
    again = np.array(cost.module_seconds(LLM, (80, tokens, sum_sq), RunMode(cp=4, recompute=True), **key))
    alone = np.array(cost.module_seconds(LLM, (20, tokens / 4, sum_sq / 4), RunMode(recompute=True), **key))
    assert again - alone == pytest.approx([3 * exchange_s, 6 * exchange_s])
    # A single sample over all ranks: the last one gets what the others have.
    longest = np.array(cost.module_seconds(LLM, (1, 4000, 4000**2), RunMode(cp=4), **key))
    of_part = np.array(cost.module_seconds(LLM, (1 / 4, 1000, 4000**2 / 4), **key))
    assert longest - of_part == pytest.approx(3 * (1e-5 + 3000 * 2 * 32 * 4 / 1e9))
    assert not cost.module_seconds(LLM, (0, 0, 0), RunMode(cp=4), **key)[0].any()
    assert cost.activation_bytes(LLM, (80, tokens, sum_sq), RunMode(cp=4), **key) == cost.activation_bytes(
        LLM, (20, tokens / 4, sum_sq / 4), **key
    )


def test_ranks_that_share_samples_send_what_enters_and_leaves_a_state():
    spec = make_specs()[0]
    kind = spec.kinds[0]
    state = replace(kind, num_heads=0, num_kv_heads=0, num_state_values=96)
    spec, links = replace(spec, layers=((kind, 1), (state, 1))), [make_link("p2p", 2, 1, 1e-5, 1e9)]
    cost = CostModel([make_table(LLM)], specs=[spec], links=links, extrapolate=True)
    once_s, again_s = cost.exchange_seconds(LLM, [0, 600, 3000], 1000, RunMode(cp=4, recompute=True), num_layers=2)
    keys = 2 * kind.key_width
    latency_s = 1e-5 + 4e-5
    # A quarter of what a rank sends stays there, and it sends its own 1000 tokens at most.
    expected = [0, latency_s + (600 * keys + 450 * 96) * 4 / 1e9, latency_s + (3000 * keys + 750 * 96) * 4 / 1e9]
    assert once_s == pytest.approx(expected)
    assert again_s == pytest.approx([2 * s for s in expected])


@pytest.mark.parametrize("trains", ["all", "none"])
@pytest.mark.parametrize("merge_tokens", [0, 4])
def test_ranks_exchange_keys_and_values_of_frames_that_are_too_long_for_one(trains, merge_tokens):
    spec = replace(with_layers(make_specs()[0], num_kv_heads=2), module="vision", merge_tokens=merge_tokens)
    links = [make_link("p2p", 2, 1, 1e-5, 1e9)]
    cost = CostModel([make_table("vision", trains=trains)], specs=[spec], links=links, extrapolate=True)
    for length, once_s in ((1200, 1e-5 + 1200 * 2 * 32 * 4 / 1e9), (900, 0.0)):
        shared, part = (
            np.array(cost.module_seconds("vision", (n, t, t * length), RunMode(cp=cp), num_layers=3, edge=True))
            for n, t, cp in ((4, 4000.0, 4), (1, 1000.0, 1))
        )
        there_s = 3 * once_s * bool(merge_tokens)  # to a frozen encoder no gradient comes back
        assert shared - part == pytest.approx([there_s, there_s * (trains == "all")])
