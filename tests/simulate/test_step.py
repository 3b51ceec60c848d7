from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.records import LLM, ModuleWork, Plan
from dflop.simulate.order import actions, num_stages_after
from dflop.simulate.step import meeting, meeting_ranks, on_shared_cores, step_nodes
from tests.builders import make_inline_plan, make_plan
from tests.simulate.graph import Durations, op_id, simulate, step_graph


def llm_work(owner) -> ModuleWork:
    n = sum(len(ids) for ranks in owner for ids in ranks)
    return ModuleWork(LLM, tuple(range(n)), (0,) * n, (10,) * n, owner)


def encoder_work(module, samples, owner) -> ModuleWork:
    return ModuleWork(module, tuple(samples), (0,) * len(samples), (5,) * len(samples), owner)


def constant(plan: Plan, forward_s: float, backward_s: float) -> Durations:
    return {node: [(forward_s, backward_s)] * plan.num_microbatches for node in step_nodes(plan)}


@pytest.mark.parametrize(("num_microbatches", "llm_pp"), [(1, 1), (4, 1), (4, 2), (8, 3)])
def test_equal_microbatches_give_the_textbook_bubble(num_microbatches, llm_pp):
    plan = make_plan({"vision": 1, LLM: 1}, llm_pp=llm_pp, num_microbatches=num_microbatches)
    owner = tuple(((k,),) for k in range(num_microbatches))
    work = (encoder_work("vision", range(num_microbatches), owner), llm_work(owner))
    timeline = simulate(step_graph(plan, work, constant(plan, 1.0, 2.0)))
    depth = 1 + llm_pp
    assert timeline.makespan_s == pytest.approx(3.0 * (num_microbatches + depth - 1))


@pytest.mark.parametrize(("dp", "cp", "ep", "shards", "of_llm", "of_vision"), [
    (4, 1, 2, 1, 2, 1), (4, 1, 2, 4, 4, 4), (2, 2, 2, 1, 1, 1), (2, 2, 4, 1, 2, 1), (4, 1, 1, 1, 1, 1),
])  # fmt: skip
def test_replicas_that_share_experts_or_parameters_wait_for_one_another(dp, cp, ep, shards, of_llm, of_vision):
    """Of groups that share samples, which are one node."""
    plan = make_inline_plan(dp)
    modules = (replace(m, parallel=replace(m.parallel, cp=cp, ep=ep), parameter_shards=shards) for m in plan.modules)
    plan = replace(plan, modules=tuple(modules))
    assert [meeting(plan.module(name), 0)[0] for name in (LLM, "vision")] == [of_llm, of_vision]
    assert meeting_ranks(plan, LLM) == of_llm


def test_ranks_wait_only_for_what_they_exchange():
    # Sample 0 has an image on encoder rank 0; sample 1, on the other LLM rank, has none.
    plan = make_plan({"vision": 2, LLM: 2}, num_microbatches=1)
    work = (encoder_work("vision", [0], (((0,), ()),)), llm_work((((0,), (1,)),)))
    durations = {
        ("vision", 0, 0): [(5.0, 1.0)],
        ("vision", 0, 1): [(99.0, 99.0)],
        (LLM, 0, 0): [(1.0, 2.0)],
        (LLM, 0, 1): [(1.0, 2.0)],
    }
    timeline = simulate(step_graph(plan, work, durations))
    start = {
        (node, phase): timeline.start_s[op_id(1, i, 0, phase)]
        for i, node in enumerate(step_nodes(plan))
        for phase in ("F", "B")
    }
    assert start[(LLM, 0, 1), "F"] == 0.0
    assert start[(LLM, 0, 0), "F"] == 5.0
    assert start[("vision", 0, 0), "B"] == 8.0
    assert timeline.makespan_s == 9.0


def test_stage_waits_for_every_encoder_and_encoder_for_every_consumer():
    plan = make_plan({"vision": 1, "audio": 1, LLM: 2}, num_microbatches=1)
    owner = (((0, 1),),)
    work = (encoder_work("vision", [0, 1], owner), encoder_work("audio", [0, 1], owner), llm_work((((0,), (1,)),)))
    durations = {
        ("vision", 0, 0): [(1.0, 1.0)],
        ("audio", 0, 0): [(3.0, 1.0)],
        (LLM, 0, 0): [(1.0, 1.0)],
        (LLM, 0, 1): [(1.0, 4.0)],
    }
    delays = {node: [(0.25, 0.25)] for node in step_nodes(plan)}
    timeline = simulate(step_graph(plan, work, durations, delays))
    assert timeline.start_s[op_id(1, 2, 0, "F")] == 3.25
    assert timeline.start_s[op_id(1, 0, 0, "B")] == 3.25 + 5.0 + 0.25


def test_processes_that_share_cores_take_turns():
    start, end = np.zeros(3), np.full(3, 2.0)
    assert on_shared_cores(start, end, 1, 3)[1].tolist() == [2.0] * 3
    assert on_shared_cores(start, end, 1, 2)[1].tolist() == [3.0] * 3
    assert on_shared_cores(start[:2], end[:2], np.array([2, 1]), 2)[1].tolist() == [3.0] * 2
    # One computes alone before the other joins it, and again after a pause in which nobody does.
    start, end = np.array([0.0, 1.0, 4.0]), np.array([2.0, 3.0, 5.0])
    found = on_shared_cores(start, end, 1, 1)
    assert [x.tolist() for x in found] == [[0.0, 1.0, 5.0], [3.0, 4.0, 6.0]]


@given(st.integers(0, 10_000), st.integers(1, 4))
def test_shared_cores_keep_order_and_have_no_more_capacity_than_there_is(seed, cores):
    rng = np.random.default_rng(seed)
    start = rng.uniform(0, 5, 12)
    seconds = rng.uniform(0, 2, 12)
    begun, done = on_shared_cores(start, start + seconds, 1, cores)
    assert (done - begun >= seconds - 1e-9).all()
    assert done.max() >= seconds.sum() / cores - 1e-9
    assert (np.argsort(begun) == np.argsort(start)).all()


def test_warm_up_counts_the_llm_behind_an_encoder():
    plan = make_plan({"vision": 1, LLM: 1}, llm_pp=3, encoder_pp=2)
    depths = [num_stages_after(plan, module, stage) for module, stage, _ in step_nodes(plan)]
    assert depths == [4, 3, 2, 1, 0]
    owner = tuple(((k,),) for k in range(4))
    graph = step_graph(plan, (encoder_work("vision", range(4), owner), llm_work(owner)), constant(plan, 1.0, 1.0))
    for node, depth in enumerate(depths):
        assert graph.node_ops[node] == tuple(op_id(4, node, a.microbatch, a.phase) for a in actions(4, depth))


def test_item_away_from_its_sample_is_our_bug():
    plan = make_plan({"vision": 1, LLM: 1}, num_microbatches=2)
    work = (encoder_work("vision", [0], ((((),)), ((0,),))), llm_work((((0,),), ((),))))
    with pytest.raises(AssertionError, match="vision item 0"):
        step_graph(plan, work, constant(plan, 1.0, 1.0))
