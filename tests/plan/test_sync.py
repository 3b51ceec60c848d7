"""Replicas that share experts: which degrees are tried, and what their messages and memory are charged with."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from dflop.cost.link_costs import ALL_REDUCE
from dflop.cost.model import CostModel
from dflop.cost.tables import tower_table
from dflop.plan.candidates import shard_choices
from dflop.plan.memory import stage_bytes
from dflop.plan.runnable import check_plan
from dflop.plan.stage_params import stage_params
from dflop.plan.sync import average_passes_s, chain_sync_s, gather_seconds
from dflop.records import LLM, RunMode
from tests.builders import make_link, with_layers
from tests.plan.problems import make_problem
from tests.plan.whole_drafts import inline_choices

M = 1_000_000
EXPERTS = {
    "num_params": 5 * M, "num_active_params": 2 * M, "num_experts": 4, "num_active_experts": 1,
    "num_expert_params": 4 * M, "num_matrix_params": 2 * M,
}  # fmt: skip
LAYERS = np.array([[4]])
DP = np.array([4])


def problem_with(*encoders, num_processes=4, num_nodes=2, device="cuda", experts=EXPERTS, **changes):
    links = [make_link(ALL_REDUCE, n, nodes, 1e-4, 1e7) for n, nodes in ((2, 1), (4, 1), (2, 2), (4, 2), (8, 2))]
    made = make_problem(*encoders, num_processes=num_processes, num_nodes=num_nodes, links=links, **changes)
    specs = (*made.specs[:-1], with_layers(made.specs[-1], **experts))
    cost = CostModel(made.cost.tables, specs=specs, links=made.cost.links, extrapolate=True)
    return dataclasses.replace(made, specs=specs, cost=cost, cluster=dataclasses.replace(made.cluster, device=device))


def test_degrees_divide_experts_and_nodes_and_need_gpus_and_a_whole_model():
    assert [problem_with().eps(tp, 1) for tp in (1, 2)] == [[1, 2, 4], [1]]
    assert problem_with(num_processes=6).eps(1, 1) == [1, 2]
    assert problem_with(device="cpu").eps(1, 1) == [1]
    assert problem_with(experts={}).eps(1, 1) == [1]
    assert problem_with(eps=(2, 8)).eps(1, 1) == [2]
    assert problem_with(num_processes=12).eps(1, 3) == [1]


def test_a_trainer_that_folds_experts_shares_them_beside_tensor_parallelism_and_without_fsdp():
    """A rank of tp 2, ep 4: half of 2M parameters in four layers and a quarter of 16M of experts, and the ends."""
    problem = problem_with(folds_experts=True)
    assert [problem.eps(tp, 1) for tp in (1, 2)] == [[1, 2, 4], [1, 2, 4]]
    choices = [of.tolist() for of in shard_choices(problem, RunMode(2, ep=4), np.array([1, 2, 4]))]
    assert choices[0] == [0, 1, 1], "groups are whole"
    how = {"dp": DP, "recompute": False, "shard_optimizer": True}
    load = np.array([[4.0], [400.0], [40_000.0]])
    found = [
        stage_bytes(problem.spec(LLM), problem.cost, LAYERS, load, RunMode(2, ep=ep), **how) for ep in (1, 4)
    ]  # fmt: skip
    ends = found[0].weights.item() / 2 - (4 + 16) / 2 * M
    assert found[1].weights.item() == 2 * (4 / 2 * M + 16 / 4 * M + ends)
    assert found[0].gradients.item() - found[1].gradients.item() == 4 * (16 / 2 - 16 / 4) * M
    assert found[0].mean_optimizer.item() == found[1].mean_optimizer.item()


def test_every_plan_can_be_run():
    problem = problem_with("vision", share_ranks=(True,), max_pp=2)
    plans = [plan for _, plan in inline_choices(problem, 2, top=None)]
    for plan in plans:
        check_plan(plan, problem.specs)
    assert {plan.module(LLM).parallel.ep for plan in plans} == {1, 2, 4}
    pinned = dataclasses.replace(problem, space=dataclasses.replace(problem.space, eps=(4,)))
    assert {p.module(LLM).parallel.ep for _, p in inline_choices(pinned, 2, top=None)} == {4}


def test_weights_and_gradients_of_a_ranks_experts_are_whole_and_their_state_is_shared_out():
    """20M parameters in layers, 16M of experts, and two ends of 1M: a rank of four has a quarter of all."""
    problem = problem_with(num_nodes=1)
    how = {"dp": DP, "shards": DP, "recompute": False, "shard_optimizer": True}
    load = np.array([[4.0], [400.0], [40_000.0]])
    found = [
        stage_bytes(problem.spec(LLM), problem.cost, LAYERS, load, RunMode(ep=ep), **how) for ep in (1, 2)
    ]  # fmt: skip
    assert [of.weights.item() for of in found] == [2 * 2 * M + 4 * 5.5 * M, 2 * (2 + 8) * M + 4 * 5.5 * M]
    assert [of.gradients.item() for of in found] == [4 * 5.5 * M, 4 * (5.5 + 8) * M]
    assert found[0].optimizer.item() == found[1].optimizer.item() == 8 * 5.5 * M
    assert found[0].kept.item() < found[1].kept.item(), "the rank with most rows keeps more"


def test_what_replicas_do_not_share_out_a_rank_has_of_its_own_experts_alone():
    """16M parameters of experts: of half of them no weights, no gradients, and no moments and master copies."""
    how = {"dp": DP, "recompute": False, "shard_optimizer": False}
    load = np.array([[4.0], [400.0], [40_000.0]])
    problem = problem_with()
    one, two = (stage_bytes(problem.spec(LLM), problem.cost, LAYERS, load, RunMode(ep=ep), **how) for ep in (1, 2))
    less = [getattr(one, part).item() - getattr(two, part).item() for part in ("weights", "gradients", "optimizer")]
    assert less == [2 * 8 * M, 4 * 8 * M, 12 * 8 * M]


@pytest.mark.parametrize("what", ["all", "projector", "adapters", "nothing of an LLM"])
def test_frozen_weights_are_gathered_and_have_no_gradients(what):
    """4M in four layers, an end of 1M on each side, and adapters of 20,000 per layer: two passes, a tower has one."""
    problem, module = problem_with("vision", num_nodes=1, experts={}), LLM if "LLM" in what else "vision"
    spec = with_layers(problem.spec(module), adapters=((0, 20_000),) if what == "adapters" else ())
    tables = [replace(t, trains="none") if "LLM" in what else t for t in problem.cost.tables if t.module == module]
    tables = [tower_table(t) for t in tables] if what == "projector" else tables
    frozen = {"projector": ("vision.tower",), "nothing of an LLM": (LLM,)}.get(what, ())
    trains = {"frozen": frozen, "adapted": ("vision",) * (what == "adapters")}
    cost = CostModel(tables, specs=[spec], links=problem.cost.links, extrapolate=True, **trains)
    problem = replace(problem, cost=cost)
    gather_s, scatter_s = gather_seconds(problem, spec, stage_params(spec, LAYERS, 1), 1, replicas=DP, shards=DP)
    once_s, nothing_s = (cost.sync_seconds(size, 4, 1) for size in (M, 1e-9))
    of_value = (once_s - nothing_s) / M / 2
    num, gathered = {"projector": (3, 4 * M), "adapters": (5, 6 * M + 80_000)}.get(what, (5, 6 * M))
    assert gather_s.item() == pytest.approx(num * nothing_s + 2 * gathered * of_value)
    num, summed = {"all": (5, 6 * M), "projector": (1, M), "adapters": (4, 80_000)}.get(what, (0, 0))
    assert scatter_s.item() == pytest.approx(num * nothing_s + 4 * summed * of_value)


@pytest.mark.parametrize(("ep", "num_nodes"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_experts_travel_once_a_step_between_the_ranks_with_the_same(ep, num_nodes):
    problem = problem_with(num_processes=4, num_nodes=num_nodes)
    spec, num = problem.spec(LLM), np.array([4 * num_nodes])
    bare = dataclasses.replace(problem, specs=problem_with(experts={"num_params": M}).specs)
    shared, without = (
        gather_seconds(of, llm, stage_params(llm, LAYERS, 1, n), 1, replicas=num, shards=num)
        for of, llm, n in ((problem, spec, ep), (bare, bare.spec(LLM), 1))
    )
    assert [x.tolist() for x in shared] == [x.tolist() for x in without]
    with_ep, plain = (
        chain_sync_s(
            problem, [spec], [stage_params(spec, LAYERS, 1, n)], 0 * LAYERS[np.newaxis], 2, RunMode(ep=n), dp=num,
            shard_optimizer=np.array([True]), shards=num,
        ).item()
        for n in (ep, 1)
    )  # fmt: skip
    pass_s = 4 * average_passes_s(problem, spec, RunMode(ep=ep), 2 * num)[:, 0]
    edge = np.array(problem.cost.module_seconds(LLM, problem.sample_loads[LLM].per_microbatch(2 * num).mean(axis=-1),
                                                num_layers=0, edge=True))[:, 0]  # fmt: skip
    expected = 0.0
    for of_value, behind_s in zip((2, 4), pass_s + edge, strict=True):
        # A layer's message behind another, half an all-reduce each; the last comes when the pass is over.
        message_s = problem.cost.sync_seconds(16 * M / ep * of_value / 2, 4 * num_nodes // ep, num_nodes)
        message_s += 3 * problem.cost.sync_seconds(1e-9, 4 * num_nodes // ep, num_nodes)
        expected += max(max(0, behind_s / 4) + message_s - behind_s, message_s / 4)
    assert with_ep - plain == pytest.approx(expected if 4 * num_nodes > ep else 0.0)


def test_an_average_of_the_weights_takes_twelve_bytes_more_than_an_optimizer_of_28():
    problem = make_problem("vision", optimizer_s_per_param=1e-8)
    how = {"dp": DP, "shard_optimizer": np.array([False]), "shards": np.array([1])}
    plain, kept = (
        chain_sync_s(problem, [spec], [stage_params(spec, LAYERS, 1)], 0 * LAYERS[np.newaxis], 2, RunMode(), **how)[0]
        for spec in (problem.spec(LLM), dataclasses.replace(problem.spec(LLM), keeps_average=True))
    )
    assert kept == pytest.approx(plain * 40 / 28)
