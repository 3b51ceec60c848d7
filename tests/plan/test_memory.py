import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.cost.model import CostModel
from dflop.cost.tables import tower_table
from dflop.models.loss_size import loss_peak_bytes
from dflop.plan.memory import layer_bytes, max_stages_beyond, stage_bytes
from dflop.plan.stage_params import first_and_last, stage_params
from dflop.records import LLM, ModuleSpec, RunMode
from dflop.simulate.order import in_flight
from tests.plan.problems import make_problem

LOAD = np.array([[4.0], [400.0], [40_000.0]])
M = 1_000_000
CROSSING = 2 * 64 * 400
"""Hidden states that a stage of 400 tokens hands over, and the gradient that comes into a layer."""
LOSS = int(loss_peak_bytes(LOAD[0], 15_625, 64, 2, trains=True)[0])  # of four tokens
MATRIX = 2 * 64 * 256
"""Gradient of an MLP's last matrix in 16 bit."""


def bytes_of(
    layers, *, module: str = LLM, frozen: bool = False, tower: bool = False, dtype: str = "bfloat16", tokens=400, **how
):
    problem = make_problem("vision", tps=(1, 2), frozen=frozen, dtype=dtype)
    if tower:
        cost = CostModel([tower_table(t) for t in problem.cost.tables if t.module == module], extrapolate=True)
        problem = dataclasses.replace(problem, cost=cost)
    how = {"dp": np.array([1]), "recompute": False, "shard_optimizer": np.array([False])} | how
    return stage_bytes(problem.spec(module), problem.cost, np.array([layers]), LOAD * tokens / 400, **how)


def test_state_and_activations_of_a_stage():
    found = bytes_of([3, 1])
    assert found.state.tolist() == [[18 * 4 * M, 18 * 2 * M]]  # the embedding on the first, the head on the last
    assert found.kept.tolist() == [[3 * 400 * 10_000 + CROSSING, 2 * 400 * 10_000 + CROSSING]]  # the last runs the edge
    # Gradients inside an MLP, more than an embedding's when nothing else is kept; that of a head in 16 and in 32 bit.
    layer = 400 * 2 * 2 * 256 + MATRIX + CROSSING
    assert found.once.tolist() == [[layer + CROSSING, LOSS + CROSSING]]  # and a message that comes in
    first = 96 * M + 3 * CROSSING + layer
    assert found.peaks(np.array([[2, 1]])).tolist() == [[first, 44 * M + LOSS + 2 * CROSSING]]
    assert bytes_of([3, 1], tokens=10).once[0, 0] == 6 * M - 3 * 10 * 10_000


def test_the_loss_is_charged_with_a_chunk_of_logits_and_the_gradient_of_the_head():
    problem = make_problem("vision", tps=(1, 2))
    how = {"dp": np.array([1]), "recompute": False, "shard_optimizer": np.array([False])}
    for num_tokens, tp, num_rows in ((4000, 1, 15_625), (4000, 2, 7_813), (9000, 1, 15_625)):
        load = LOAD * [[num_tokens / 4], [1], [1]]
        found = stage_bytes(problem.spec(LLM), problem.cost, np.array([[3, 1]]), load, RunMode(tp), **how)
        logits = 2 * num_rows * min(num_tokens, 4096) + 2 * (16 << 20)  # and two blocks in float32
        layer, loss = (
            (409_600 + MATRIX + CROSSING) / tp + 2 * CROSSING * (tp > 1),
            logits + 4 * 64 * num_rows + 2 * 64 * num_tokens,
        )
        assert found.once.tolist() == [[layer + CROSSING / tp, loss + CROSSING / tp]]


def test_casts_to_8_bit_take_nine_bytes_a_value_on_top_of_what_a_layer_has_made():
    problem = make_problem("vision")
    table = dataclasses.replace(problem.cost.table(LLM), fp8="tensorwise")
    cost = CostModel([table], extrapolate=True)
    how = {"dp": np.array([1]), "recompute": False, "shard_optimizer": np.array([False])}
    for tokens, cast in ((400, 400 * 256), (40, 64 * 256)):  # an MLP's input, or its matrix
        load = LOAD * tokens / 400
        found = stage_bytes(problem.spec(LLM), cost, np.array([[400, 1]]), load, **how)  # keeps more than an embedding
        assert found.once[0, 0] == tokens * (2 * 256 + 64) + 9 * cast + 2 * 2 * 64 * tokens


def test_replicas_share_the_optimizers_part_of_the_state():
    sharded = {"dp": np.array([4]), "shard_optimizer": np.array([True])}
    assert bytes_of([4], **sharded).state.tolist() == [[(6 + 12 / 4) * 6 * M]]
    # Of many, one still owns the whole embedding.
    assert bytes_of([4], **sharded | {"dp": np.array([48])}).optimizer.tolist() == [[12 * M]]
    # In float32 weight and gradient alone take 8 bytes, and only the two moments are left to share.
    assert bytes_of([4], dtype="float32", **sharded).state.tolist() == [[(8 + 8 / 4) * 6 * M]]
    parts = bytes_of([4], dp=np.array([4]), shards=4)
    assert parts.weights.tolist() == [[2 * 2 * M + 4 * 6 * M / 4]], "both ends are gathered"
    assert parts.once.tolist() == [[LOSS + (2 * 2 + 6 * 2) * M]], "and two layers, with the gradients of the ends"
    assert (parts.gradients + parts.optimizer).tolist() == [[12 * 6 * M / 4]]
    assert bytes_of([4], dp=np.array([4])).state.tolist() == [[18 * 6 * M]]
    assert bytes_of([4], dtype="float32", dp=np.array([4])).state.tolist() == [[16 * 6 * M]]


def test_an_average_of_the_weights_is_one_more_state():
    problem = make_problem("vision", dtype="bfloat16")
    spec = dataclasses.replace(problem.spec(LLM), keeps_average=True)
    how = {"dp": np.array([4]), "recompute": False, "shard_optimizer": np.array([True])}
    plain, kept = (stage_bytes(s, problem.cost, np.array([[4]]), LOAD, **how) for s in (problem.spec(LLM), spec))
    assert (kept.state - plain.state).tolist() == [[4 * 6 * M / 4]]


def test_frozen_modules_keep_weights_alone():
    for how in ({}, {"dp": np.array([4]), "shards": 4}):
        assert bytes_of([4], module="vision", frozen=True, **how).state.tolist() == [[2 * 6 * M]]


def test_of_a_frozen_tower_the_edge_alone_has_gradients_and_an_optimizer():
    found = bytes_of([4], module="vision", tower=True)
    assert found.state.tolist() == [[2 * 5 * M + 18 * M]]
    assert found.kept.tolist() == [[400 * 10_000]], "layers keep nothing"
    sharded = {"dp": np.array([4]), "shard_optimizer": np.array([True])}
    assert bytes_of([4], module="vision", tower=True, **sharded).state.tolist() == [[2 * 5 * M + 18 * M]]
    parts = bytes_of([4], module="vision", tower=True, dp=np.array([4]), shards=4)
    assert parts.weights.tolist() == [[2 * 2 * M + (2 * 5 + 4) * M / 4]], "both ends are gathered"
    assert (parts.gradients + parts.optimizer).tolist() == [[12 * M / 4]]


def test_recomputation_keeps_inputs_and_one_whole_layer():
    found = bytes_of([3, 1], recompute=True)
    assert found.kept.tolist() == [[3 * 400 * 1_000 + CROSSING, 400 * 1_000 + 400 * 10_000]]
    layer = 4_000 * (10_000 + 2 * 2 * 256) + MATRIX + 10 * CROSSING
    loss = loss_peak_bytes(10 * LOAD[0], 15_625, 64, 2, trains=True)[0]
    assert bytes_of([3, 1], recompute=True, tokens=4_000).once.tolist() == [
        [layer + 10 * CROSSING, loss + 10 * CROSSING]
    ]


def test_stages_without_layers_of_the_module_hold_nothing_of_it():
    found = bytes_of([0, 4, 0], recompute=True)
    assert found.state.tolist() == [[0, 18 * 6 * M, 0]]
    assert found.kept[0, [0, 2]].tolist() == [0, 0]
    assert found.once[0, [0, 2]].tolist() == [0, 0]
    first, last = first_and_last(np.array([0, 2, 1, 1, 0]))
    assert first.tolist() == [False, True, False, False, False]
    assert last.tolist() == [False, False, False, True, False]


def test_tensor_parallelism_cuts_layers_embedding_and_head_and_nothing_else_before_layers():
    problem = make_problem("vision")
    layers, spec = np.array([4]), problem.spec(LLM)
    assert stage_params(spec, layers, 2).total.tolist() == [2 * M + M // 2 + M // 2]
    per_layer = dataclasses.replace(spec, num_entry_params=3 * M, num_edge_params=spec.num_edge_params + 2 * M)
    assert stage_params(per_layer, layers, 2).entry.tolist() == [2 * M + M // 2]
    assert stage_params(problem.spec("vision"), layers, 2).total.tolist() == [4 * M]


def test_a_tied_embedding_is_on_both_ends_and_deep_features_are_made_where_their_layers_are():
    llm, vision = (make_problem("vision").spec(module) for module in (LLM, "vision"))
    tied = dataclasses.replace(llm, is_tied=True, num_edge_params=M)
    assert stage_params(tied, np.array([2, 0, 2]), 2).total.tolist() == [M + M // 2, 0, M + M // 2]
    assert stage_params(tied, np.array([4]), 2).total.tolist() == [2 * M + M // 2]
    deep = dataclasses.replace(vision, num_edge_params=5 * M, num_deep_params=3 * M, deep_layers=(0, 1, 3))
    assert stage_params(deep, np.array([2, 2]), 1).total.tolist() == [(2 + 1 + 2) * M, (2 + 1 + 1) * M]


def with_kinds(spec: ModuleSpec, num_first: int, **changes: float) -> ModuleSpec:
    """Four layers, the first ones as before, the others with other fields."""
    ((kind, num),) = spec.layers
    other = dataclasses.replace(kind, name="other", **changes)
    return dataclasses.replace(spec, layers=((kind, num_first), (other, num - num_first)))


EXPERTS = {"num_params": 5 * M, "num_active_params": 2 * M, "mlp_width": 512, "num_matrix_params": 3 * M}


def test_a_stage_holds_the_parameters_of_its_own_kinds_of_layers():
    spec = with_kinds(make_problem("vision").spec(LLM), 1, **EXPERTS)
    found = stage_params(spec, np.array([[2, 2], [1, 3], [0, 4]]), 1)
    assert found.layers.tolist() == [[6 * M, 10 * M], [M, 15 * M], [0, 16 * M]]
    assert found.largest_layers.tolist() == [[10 * M, 10 * M], [M, 15 * M], [0, 20 * M]]
    assert found.matrix.tolist() == [[3 * M, 3 * M], [64 * 256, 3 * M], [0, 3 * M]]
    assert found.num_matrices.tolist() == [[2 + 1, 2], [2, 3], [0, 5]]
    assert stage_params(spec, np.array([2, 2]), 2).layers.tolist() == [3 * M, 5 * M]


def test_stages_keep_what_their_own_layers_do_and_no_less_where_some_run_again():
    problem = make_problem("vision")
    spec = with_kinds(problem.spec(LLM), 1, **EXPERTS)
    how = {"dp": np.array([1]), "shard_optimizer": np.array([False])}
    plain, some = (
        stage_bytes(spec, problem.cost, np.array([[2, 2]]), LOAD, recompute=again, **how).kept[0, 0] - CROSSING
        for again in (False, np.array([[1, 0]]))
    )
    # 8 and 10 bytes of the queries' and the MLP's width, 2064 and 2576 in all; a mean layer is measured at 10,000.
    dense, experts = (400 * 10_000 * kept / 2448 for kept in (2064, 2576))
    assert plain == math.ceil(dense + experts)
    assert some == math.ceil(experts + 400 * 1_000)


@pytest.mark.parametrize("shards", [1, 2])
def test_kinds_that_are_alike_are_one(shards):
    problem, layers = make_problem("vision", tps=(1, 2)), np.array([[3, 1], [2, 2]])
    how = {"dp": np.array([2, 2]), "recompute": np.array([[1, 0], [0, 2]]), "shard_optimizer": np.array([True, False])}
    one, two = (
        stage_bytes(spec, problem.cost, layers, np.repeat(LOAD, 2, axis=1), RunMode(2), shards=shards, **how)
        for spec in (problem.spec(LLM), with_kinds(problem.spec(LLM), 3))
    )
    for field in dataclasses.fields(one):
        assert np.array_equal(getattr(one, field.name), getattr(two, field.name)), field.name


def test_sums_of_modules_on_one_stage():
    total = bytes_of([4, 0], module="vision", recompute=True) + bytes_of([0, 4], recompute=True)
    assert total.state.tolist() == [[18 * 6 * M, 18 * 6 * M]]
    assert total.once.tolist() == [[6 * M, LOSS]]
    both = bytes_of([4], module="vision", recompute=True) + bytes_of([4], recompute=True)
    assert both.once.tolist() == [[LOSS]]  # one layer runs at a time


@settings(max_examples=40)
@given(st.integers(1, 8), st.integers(100, 500), st.integers(0, 6), st.integers(1, 4), st.booleans())
def test_depth_limit_is_the_memory_limit_solved_for_depth(m, limit_mb, beyond, max_pp, frozen):
    problem = make_problem("vision", max_pp=max_pp, frozen=frozen)
    layers = np.array([[4 // max_pp + (stage < 4 % max_pp) for stage in range(max_pp)]] * 2)
    how = {"dp": np.array([1, 2]), "shard_optimizer": np.array([False, True]), "recompute": frozen}
    found = stage_bytes(problem.specs[0], problem.cost, layers, np.repeat(LOAD * 10, 2, axis=1), **how)
    pp = np.array([max_pp, max_pp])
    deepest = max_stages_beyond(found, pp, num_microbatches=m, usable_bytes=limit_mb * 10**6)
    after = pp[:, np.newaxis] - 1 + beyond - np.arange(max_pp)
    peaks = found.peaks(in_flight(m, after))
    assert (peaks <= limit_mb * 10**6).all(axis=1).tolist() == (beyond <= deepest).tolist()


def test_context_parallel_ranks_share_tokens_and_keep_the_keys_and_values_they_are_sent():
    """400 tokens on four ranks: each has 100, and is sent sqrt(40,000) of one sample, 64 keys and values each."""
    keys = 2 * 2 * 64 * 200
    found, alone = bytes_of([3, 1], mode=RunMode(cp=4)), bytes_of([3, 1], tokens=100)
    assert (found.kept - alone.kept).tolist() == [[3 * keys, keys]]
    assert found.state.tolist() == bytes_of([3, 1], dp=np.array([4])).state.tolist(), "replicas hold the same weights"
    sharded = {"shard_optimizer": np.array([True]), "dp": np.array([2])}
    whole = bytes_of([3, 1], **sharded | {"dp": np.array([8])})
    assert bytes_of([3, 1], mode=RunMode(cp=4), **sharded).state.tolist() == whole.state.tolist()
    # Layers that run again fetch them again: one layer's are there at a time.
    again, without = (
        bytes_of([3, 1], recompute=True, **how)
        for how in ({"mode": RunMode(cp=4), "tokens": 16_000}, {"tokens": 4_000})
    )
    assert (again.kept - without.kept)[0, 0] == 0
    assert again.once[0, 0] - without.once[0, 0] == pytest.approx(2 * 2 * 64 * math.sqrt(40 * 40_000), abs=1)
    # Of a vision tower no rank is sent anything, unless its frames can be cut: then of one of 200 tokens.
    vision = [bytes_of([4], module="vision", **how).kept.tolist() for how in ({"mode": RunMode(cp=4)}, {"tokens": 100})]
    assert vision[0] == vision[1]
    problem = make_problem("vision")
    loads = LOAD, LOAD / 4
    kept = [
        layer_bytes(dataclasses.replace(problem.spec("vision"), merge_tokens=4), problem.cost, load, RunMode(cp=cp))
        for load, cp in zip(loads, (4, 1), strict=True)
    ]
    assert (kept[0] - kept[1]).tolist() == [keys]
    two = bytes_of([3, 1], mode=RunMode(cp=2))  # more than the other has cannot come
    assert (two.kept - bytes_of([3, 1], tokens=200).kept).tolist() == [[3 * keys, keys]]
    assert (
        bytes_of([3, 1], mode=RunMode(cp=2), tokens=100).kept[0, 0]
        == bytes_of([3, 1], tokens=50).kept[0, 0] + 3 * keys / 4
    )


def test_deep_features_stay_on_the_first_stage_of_an_llm():
    problem, layers = make_problem("vision"), np.array([[3, 1]])
    specs = [dataclasses.replace(problem.spec(LLM), num_input_values=n) for n in (0, 5)]
    how = {"dp": np.array([1]), "recompute": True, "shard_optimizer": np.array([False])}
    for mode, kept in ((RunMode(), 2 * 5 * 400), (RunMode(2), 5 * 400)):
        without, found = (stage_bytes(spec, problem.cost, layers, LOAD, mode, **how) for spec in specs)
        assert (found.kept - without.kept).tolist() == [[kept, -kept]], "which tables count with the edge"


def test_one_context_parallel_rank_may_have_all_tokens_with_loss():
    load = np.array([[90.0], [400.0], [40_000.0]])
    problem, how = make_problem("vision"), {"dp": np.array([1]), "recompute": False}
    how |= {"shard_optimizer": np.array([False])}
    found = stage_bytes(problem.spec(LLM), problem.cost, np.array([[3, 1]]), load, RunMode(cp=4), **how)
    assert found.once[0, 1] == loss_peak_bytes(90, 15_625, 64, 2, trains=True) + CROSSING / 4
