"""FSDP2, sequence and context parallelism as people run them: degrees, messages, memory, and that none is missed."""

import dataclasses
import math

import numpy as np
import pytest

from dflop.compare.experts import other_trainers
from dflop.compare.experts.expert_plan import in_groups, peak_bytes, with_all_degrees
from dflop.compare.experts.megatron import expert_parallel_plan as megatron_parallel_plan
from dflop.compare.experts.megatron import expert_plan
from dflop.compare.experts.other_trainers import TRAINERS, trainer_plan
from dflop.compare.experts.sharded import (
    POLICY,
    Grid,
    bounds,
    context_parallel_plan,
    expert_parallel_plan,
    freed_bytes,
    fsdp_plan,
    grids,
    sequence_parallel_plan,
    sharded_plan,
)
from dflop.compare.experts.shared_samples import CONTEXT, SEQUENCE, shared_costs
from dflop.cost.link_costs import ALL_REDUCE, P2P
from dflop.cost.model import CostModel
from dflop.emit.megatron_bridge import bridge_problems
from dflop.errors import InfeasiblePlanError
from dflop.plan.candidates import shard_choices
from dflop.plan.drafts import draft, fits
from dflop.plan.grid_choice import GridChoice
from dflop.plan.rank import policy_step_s
from dflop.plan.search import plan_problem
from dflop.records import LLM, ParallelSpec, RunMode
from dflop.simulate.step import together
from tests.builders import make_link, with_layers
from tests.plan.problems import baseline_problem

LATENCY_S, RATE = 1e-5, 1e9
LINKS = tuple(make_link(op, 2, 1, LATENCY_S, RATE) for op in (ALL_REDUCE, P2P))
DEGREES = (1, 2, 4, 8)


def plan_of(problem, num_microbatches, *, tp=1, shards=8, eighths=0):
    grid = GridChoice(
        ParallelSpec(tp, 1, 8 // tp), {s.module: (s.num_layers,) for s in problem.specs},
        {s.module: (-(-s.num_layers * eighths // 8),) for s in problem.specs}, True, shards,
    )  # fmt: skip
    return draft(problem, num_microbatches, [grid], math.nan)


def simulated_s(problem, expert):
    """Whether token caps hold it or not: its own memory was held to bytes."""
    return policy_step_s(dataclasses.replace(problem, cost=expert.cost), expert.grouped, POLICY, is_held=False)


def test_degrees_divide_the_heads_and_groups_lie_in_a_node():
    problem = baseline_problem()  # 8 ranks, 4 heads, tp 1 and 2
    assert {(g.tp, g.num_sharing) for g in grids(problem, SEQUENCE, DEGREES)} == {
        (1, 1),
        (1, 2),
        (1, 4),
        (2, 1),
        (2, 2),
    }
    encoder, llm = problem.specs
    odd = dataclasses.replace(problem, specs=(encoder, with_layers(llm, num_heads=6, num_kv_heads=2)))
    assert {(g.tp, g.num_sharing) for g in grids(odd, SEQUENCE, DEGREES)} == {(1, 1), (1, 2), (2, 1)}
    cluster = dataclasses.replace(problem.cluster, num_nodes=4, num_processes_per_node=2)
    small = dataclasses.replace(problem, cluster=cluster)
    assert {(g.tp, g.num_sharing) for g in grids(small, SEQUENCE, DEGREES)} == {(1, 1), (1, 2), (2, 1)}
    assert {g.shards for g in grids(problem, CONTEXT, (2,))} == {1}


def test_messages_by_hand():
    problem = baseline_problem(links=LINKS)
    for recompute in (False, True):
        plain = problem.cost.table(LLM, RunMode(recompute=recompute))
        shared = shared_costs(problem, SEQUENCE, 2).table(LLM, RunMode(2, recompute=recompute))
        # A rank of two holds half of the tokens, 64 values of 2 bytes each, sends half of them, four times a layer; an
        # all-reduce of two sends its buffer once in the same time.
        sent_s, latency_s = 4 * (64 * 2 / 2) / 2 / RATE, 4 * LATENCY_S
        for terms, alone, times in (
            (shared.forward_s, plain.forward_s, 1),
            (shared.backward_s, plain.backward_s, 1 + recompute),
        ):
            assert terms.layer_per_token == pytest.approx(alone.layer_per_token / 2 + times * sent_s)
            assert terms.layer_fixed == pytest.approx(alone.layer_fixed + times * latency_s)
            assert terms.layer_per_sq_token == pytest.approx(alone.layer_per_sq_token / 2)
            assert (terms.edge_per_token, terms.edge_fixed) == (alone.edge_per_token / 2, alone.edge_fixed)
        # Keys and values of half of the tokens go to the other rank; back go these and their gradients.
        ring = shared_costs(problem, CONTEXT, 2).table(LLM, RunMode(2, recompute=recompute))
        ring_s = 2 * (64 * 2 / 2) / RATE
        assert ring.forward_s.layer_per_token == pytest.approx(plain.forward_s.layer_per_token / 2 + ring_s)
        assert ring.backward_s.layer_per_token == pytest.approx(
            plain.backward_s.layer_per_token / 2 + (2 + recompute) * ring_s
        )
    vision = shared_costs(problem, SEQUENCE, 2).table("vision", RunMode(2))
    alone = problem.cost.table("vision")
    assert vision.forward_s.layer_per_token == pytest.approx(1.03 / 2 * alone.forward_s.layer_per_token)
    assert vision.forward_s.layer_fixed == alone.forward_s.layer_fixed


def test_a_curve_bends_at_the_tokens_of_a_rank():
    problem = baseline_problem()
    bent = dataclasses.replace(
        problem.cost.table(LLM), forward_s=dataclasses.replace(
            problem.cost.table(LLM).forward_s, layer_knots=(100.0,), layer_bends=(1e-3,)
        )
    )  # fmt: skip
    others = [t for t in problem.cost.tables if (t.module, t.recompute) != (LLM, False)]
    cost = type(problem.cost)([bent, *others], specs=problem.specs, extrapolate=True)
    shared = shared_costs(dataclasses.replace(problem, cost=cost), SEQUENCE, 4)
    for tokens in (80, 400, 4000):
        load = {"num_layers": 1, "edge": False}
        alone = cost.module_seconds(LLM, (0, tokens / 4, 0), **load)[0]
        assert shared.module_seconds(LLM, (0, tokens, 0), RunMode(4), **load)[0] == pytest.approx(alone)


def test_a_rank_of_k_keeps_its_part_of_the_tokens():
    problem = baseline_problem()
    plan = plan_of(problem, 2)
    loads = {"vision": np.zeros((3, 2)), LLM: np.array([[10.0, 10.0], [4000.0, 8000.0], [0.0, 0.0]])}
    few, many = peak_bytes(problem, plan, loads, 4)
    # Four layers and the edge keep 10 kB a token, and the rank has a quarter of the tokens.
    assert many - few == (4 + 1) * 1e4 * (8000 - 4000) / 4
    alone = peak_bytes(problem, plan, {name: load / 4 for name, load in loads.items()}, 1)
    assert alone.tolist() == [few, many]
    (state,) = peak_bytes(problem, plan, {name: np.zeros((3, 1)) for name in loads}, 4)
    replicated = plan_of(problem, 2, shards=4)
    assert state < peak_bytes(problem, replicated, {name: np.zeros((3, 1)) for name in loads}, 4)[0]


@pytest.mark.parametrize("memory_mib", [120, 150, 16384])
def test_plain_fsdp_is_the_best_of_all_that_were_tried_one_by_one(memory_mib):
    problem = baseline_problem(memory_bytes=memory_mib * 2**20, links=LINKS)
    best_s = math.inf
    for shards in {int(of[0]) for of in shard_choices(problem, RunMode(), np.array([8]))} - {0}:
        for m in [m for m in problem.microbatch_choices if m * 8 <= problem.global_batch_size]:
            plans = [plan_of(problem, m, shards=shards, eighths=eighths) for eighths in range(9)]
            fitting = [plan for plan in plans if fits(problem, plan)]
            # As few eighths of the layers recompute as memory asks for, an eighth more, or all.
            tried = [*fitting[:2], *fitting[-1:]]
            best_s = min([best_s, *(policy_step_s(problem, plan, POLICY) for plan in tried)])
    found = fsdp_plan(problem)
    assert (policy_step_s(problem, found.plan, POLICY) if found else math.inf) == best_s
    if found:
        assert (found.grouped, found.cost, found.sharing) == (found.plan, problem.cost, "")
        assert found.holds(problem)


@pytest.mark.parametrize("memory_mib", [95, 150, 16384])
def test_sequence_parallelism_is_never_worse_than_fsdp_alone_and_all_are_above_their_bounds(memory_mib):
    problem = baseline_problem(memory_bytes=memory_mib * 2**20, links=LINKS)
    alone, found, context = (make(problem) for make in (fsdp_plan, sequence_parallel_plan, context_parallel_plan))
    assert found.holds(problem)
    assert alone is None or simulated_s(problem, found) <= simulated_s(problem, alone)
    assert context is None or context.num_sharing > 1
    for expert, sharing in ((found, SEQUENCE), (context, CONTEXT)):
        for grid in grids(problem, sharing, DEGREES) if expert else ():
            least = min(bounds(problem, grid), default=(math.inf,))
            shown = expert.plan.modules[-1]
            if (grid.tp, grid.num_sharing, grid.shards) == (
                shown.parallel.tp, expert.num_sharing, shown.parameter_shards
            ):  # fmt: skip
                assert least[0] <= simulated_s(problem, expert)


SHARED = {"num_params": 5_000_000, "num_active_params": 2_000_000, "num_experts": 4, "num_active_experts": 1,
          "num_expert_params": 4_000_000, "num_matrix_params": 2_000_000}  # fmt: skip


def with_experts(**changes):
    problem = baseline_problem(links=LINKS, **changes)
    specs = (*problem.specs[:-1], with_layers(problem.specs[-1], **SHARED))
    cost = CostModel(problem.cost.tables, specs=specs, links=LINKS, extrapolate=True)
    cluster = dataclasses.replace(problem.cluster, device="cuda")
    return dataclasses.replace(problem, specs=specs, cost=cost, cluster=cluster)


@pytest.mark.parametrize("recompute", [False, True])
def test_shared_experts_cost_trainers_what_they_cost_our_plans(recompute):
    problem, load = with_experts(), (10.0, 4000.0, 4e6)
    how = {"num_layers": 3, "edge": True}
    ours, plain = (
        np.array(problem.cost.module_seconds(LLM, load, RunMode(recompute=recompute, ep=ep), **how)) for ep in (4, 1)
    )
    baked = shared_costs(problem, SEQUENCE, 1, 4).module_seconds(LLM, load, RunMode(recompute=recompute), **how)
    assert baked == pytest.approx(ours)
    group = (20.0, 8000.0, 8e6)
    two, alone = (
        np.array(
            shared_costs(problem, SEQUENCE, 2, ep).module_seconds(LLM, group, RunMode(2, recompute=recompute), **how)
        )
        for ep in (4, 1)
    )
    assert two - alone == pytest.approx(ours - plain), "a rank of two has half of the tokens"


def test_experts_are_gathered_for_every_pass_or_kept_whole_for_a_step():
    problem = with_experts()
    cost = shared_costs(problem, SEQUENCE, 1, 2)
    whole, each = (sharded_plan(problem, Grid(1, 1, 8, cost, 2, gathers_experts=way), 2, 0) for way in (False, True))
    # Of 16M parameters in experts a rank has half, and every fourth of eight ranks the same.
    assert freed_bytes(problem, Grid(1, 1, 8, cost, 2, gathers_experts=True)) == (2 + 4) * 8e6
    gathered = each.module(LLM).gather_s[0] - whole.module(LLM).gather_s[0]
    messages_s = 3 * problem.cost.sync_seconds(1e-9, 4, 1)
    expected = np.array([problem.cost.sync_seconds(8e6 * of_value / 2, 4, 1) + messages_s for of_value in (2, 4)])
    assert [gathered, each.module(LLM).scatter_s[0] - whole.module(LLM).scatter_s[0]] == pytest.approx(expected)
    assert each.sync_s < whole.sync_s


def test_models_with_experts_have_plans_that_share_them_and_others_none():
    problem = with_experts(microbatches=(1, 2))
    for make in (expert_parallel_plan, megatron_parallel_plan):
        found = make(problem)
        assert found.plan.module(LLM).parallel.ep > 1
        assert found.holds(problem)
        assert make(baseline_problem()) is None
    wide = with_all_degrees(dataclasses.replace(problem, specs=tuple(
        dataclasses.replace(spec, tp_choices=(1,)) for spec in problem.specs)))  # fmt: skip
    assert [spec.tp_choices for spec in wide.specs] == [(1, 2, 4)] * 2
    assert wide.tps(wide.specs[-1]) == [1, 2, 4]


def test_what_fits_nowhere_is_no_plan():
    problem = baseline_problem(memory_bytes=20 * 2**20, microbatches=(1, 2))
    assert [make(problem) for make in (fsdp_plan, sequence_parallel_plan, context_parallel_plan)] == [None] * 3
    huge = dataclasses.replace(problem.batches[0][0], sample_index=-1, num_llm_tokens=10**7)
    roomy = baseline_problem(microbatches=(1, 2))
    assert not sequence_parallel_plan(roomy).holds(dataclasses.replace(roomy, worst_samples=(huge,)))
    assert sequence_parallel_plan(dataclasses.replace(roomy, worst_samples=(huge,))) is None


def test_a_group_that_shares_parameters_within_itself_waits_for_its_messages():
    problem = baseline_problem(links=LINKS)
    grouped = in_groups(plan_of(problem, 2, shards=4), 4)
    llm = grouped.module(LLM)
    assert (llm.parallel, llm.parameter_shards) == (ParallelSpec(4, 1, 2), 1)
    seconds = np.full((2, 2), 1e-9)
    forward_s, backward_s = together(grouped, LLM, 0, seconds, seconds)
    assert (forward_s == llm.gather_s[0]).all()
    assert (backward_s == llm.gather_s[0] + llm.scatter_s[0]).all()
    longer_s = np.array(together(grouped, LLM, 0, seconds + 1, seconds + 2))
    assert longer_s[:, 0, 0] == pytest.approx([1 + 0.808 * forward_s[0, 0], 2 + 0.808 * backward_s[0, 0]])


def test_an_expert_of_megatron_has_none_of_our_context_parallelism():
    task = baseline_problem(cps=(2,))
    assert any(plan.module(LLM).parallel.cp == 2 for plan in plan_problem(task))
    assert expert_plan(task).plan.module(LLM).parallel.cp == 1


@pytest.mark.parametrize("name", [name for name, of in TRAINERS.items() if not of.has_stages])
def test_what_is_emitted_for_a_trainer_is_the_fastest_that_its_keys_can_say(name):
    problem = baseline_problem(links=LINKS)
    plan, trainer = trainer_plan(problem, name), TRAINERS[name]
    parallel = plan.module(LLM).parallel
    assert parallel.num_processes == 8
    assert parallel.cp == 1 or trainer.has_ulysses
    assert parallel.tp == 1 or trainer.has_tp
    assert {sum(m.num_recomputed) for m in plan.modules} <= {0, *(spec.num_layers for spec in problem.specs)}
    best = sequence_parallel_plan(problem) if trainer.has_ulysses else fsdp_plan(problem)
    assert plan.predicted_step_s >= best.plan.predicted_step_s * (0.0 if trainer.has_tp else 1.0)
    assert plan.predicted_step_s == pytest.approx(simulated_s(problem, best), rel=0.2)
    tokens = [sample.num_llm_tokens for batch in problem.batches for sample in batch]
    num_packs = plan.num_microbatches * parallel.dp
    assert plan.module(LLM).max_tokens >= max(tokens)
    assert num_packs * plan.module(LLM).max_tokens >= problem.global_batch_size * sum(tokens) / len(tokens) * 0.99


def test_what_is_emitted_for_a_trainer_with_pipelines_is_the_fastest_that_its_keys_can_say(monkeypatch):
    problem = baseline_problem(links=LINKS)
    plan = trainer_plan(problem, "megatron-bridge")
    assert not bridge_problems(plan, problem.cluster)
    space = dataclasses.replace(problem.space, share_ranks=(True,), shard_parameters=(False,))
    free = plan_problem(dataclasses.replace(problem, space=space), policy="arrival")
    fine = [other.predicted_step_s for other in free if not bridge_problems(other, problem.cluster)]
    assert plan.predicted_step_s == pytest.approx(min(fine), rel=1e-6)
    odd = dataclasses.replace(problem, global_batch_size=45)
    plan = trainer_plan(odd, "megatron-bridge")  # microbatches and replicas of equal size
    assert 45 % (plan.num_microbatches * plan.module(LLM).parallel.dp) == 0
    monkeypatch.setattr(other_trainers, "bridge_problems", lambda *_: ["the reason"])
    with pytest.raises(InfeasiblePlanError, match=r"no keys for any of the .* best plans of one pipeline: the reason"):
        trainer_plan(problem, "megatron-bridge")


def test_a_trainer_for_which_nothing_fits_is_said():
    with pytest.raises(InfeasiblePlanError, match="no plan that veomni can run on 8"):
        trainer_plan(baseline_problem(memory_bytes=20 * 2**20, microbatches=(1, 2)), "veomni")
