"""Uniform plans, tuned and default."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.errors import InfeasiblePlanError
from dflop.plan.drafts import draft, fits
from dflop.plan.grid_choice import GridChoice
from dflop.plan.partition import even_chain, even_layers
from dflop.plan.rank import arrival_step_s
from dflop.plan.uniform import MIN_SIMULATED, default_plan, tuned_uniform
from dflop.records import LLM, ParallelSpec
from tests.builders import make_specs, with_layers
from tests.plan.problems import baseline_problem, tiles_the_cluster, uniform_plans

# Layers cut by count


def test_even_layers_put_the_remainder_first():
    assert even_layers(7, 3) == (3, 2, 2)
    specs = make_specs("vision", "audio")
    assert even_chain(specs, 5) == {"vision": (4, 0, 0, 0, 0), "audio": (4, 0, 0, 0, 0), LLM: (0, 1, 1, 1, 1)}


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 12), st.integers(1, 3))
def test_even_chain_keeps_encoders_whole_and_shares_out_the_llm(depths, pp, num_entry_layers):
    names = ("vision", "audio", LLM)[-len(depths) :]
    spec = dataclasses.replace(make_specs()[0], num_entry_layers=min(num_entry_layers, depths[-1]))
    specs = [dataclasses.replace(with_layers(spec, n), module=name) for name, n in zip(names, depths, strict=True)]
    pp = min(pp, depths[-1])
    chain = even_chain(specs, pp)
    *encoders, (first, *others) = (chain[name] for name in names)
    assert encoders == [(n, *[0] * (pp - 1)) for n in depths[:-1]]
    assert first + sum(others) == depths[-1]
    assert min(others, default=1) > 0
    assert max(others, default=0) - min(others, default=0) <= 1
    share = even_layers(sum(depths), pp)[0]
    wanted = max(0, share - sum(depths[:-1]))
    assert first == (0 if encoders and wanted < num_entry_layers else wanted) or num_entry_layers > depths[-1]


# Uniform plans


@pytest.mark.parametrize(("encoders", "memory_mib"), [(("vision",), 135), (("vision", "audio"), 220)])
def test_uniform_plans_tile_the_cluster_and_fit(encoders, memory_mib):
    problem = baseline_problem(*encoders, memory_bytes=memory_mib * 2**20)
    found = uniform_plans(problem)
    assert len({p.plan_id for p in found}) == len(found) > 20
    kinds = set()
    for plan in found:
        assert tiles_the_cluster(problem, plan)
        assert fits(problem, plan)
        parallel = plan.modules[-1].parallel
        kinds.add((parallel, plan.num_microbatches))
        assert parallel.dp * plan.num_microbatches <= 24
        assert {m.module: m.layers_per_stage for m in plan.modules} == even_chain(problem.specs, parallel.pp)
        assert {m.shard_optimizer for m in plan.modules} == {parallel.dp > 1}
    assert len(kinds) == len(found)
    assert {p.modules[0].recompute for p in found} == {False, True}


def test_uniform_plans_recompute_only_where_memory_asks_for_it():
    def by_way(**changes):
        found = {False: set(), True: set()}
        for plan in uniform_plans(baseline_problem(memory_bytes=100 * 2**20, **changes)):
            found[plan.modules[0].recompute].add((plan.modules[-1].parallel, plan.num_microbatches))
        return found

    either, plain = by_way(), by_way(recompute=(False,))
    assert either[False] == plain[False]
    assert either[True]
    assert not either[True] & plain[False]


@pytest.mark.parametrize("memory_mib", [105, 120, 135])
def test_uniform_plans_are_all_whose_drafts_fit(memory_mib):
    problem = baseline_problem(memory_bytes=memory_mib * 2**20)

    def drafts(parallel, num_microbatches):
        layers = even_chain(problem.specs, parallel.pp)
        is_shared = parallel.dp > 1
        for way in (False, True):
            grid = GridChoice.of(parallel, layers, recompute=way, shard_optimizer=is_shared)
            yield draft(problem, num_microbatches, [grid], 0.0)

    degrees = [ParallelSpec(tp, pp, 8 // (tp * pp)) for tp in (1, 2) for pp in (1, 2, 4)]
    wanted = [
        next((plan.plan_id for plan in drafts(parallel, m) if fits(problem, plan)), None)
        for parallel in degrees
        for m in problem.microbatch_choices
        if parallel.dp * m <= 24
    ]
    found = [plan.plan_id for plan in uniform_plans(problem)]
    assert found == [plan_id for plan_id in wanted if plan_id]
    assert 0 < len(found) < len(wanted)


def test_uniform_plans_cut_no_module_into_more_stages_than_it_can_be():
    problem = baseline_problem(max_pp=1)
    assert {p.modules[-1].parallel.pp for p in uniform_plans(problem)} == {1, 2}  # 4 + 4 layers in halves: one each


def test_tuned_uniform_is_the_fastest_of_all_by_simulation():
    problem = baseline_problem(tps=(1, 2, 4))
    asked = []

    def step_s(plan):
        asked.append(plan.plan_id)
        return arrival_step_s(problem, plan)

    best = tuned_uniform(problem, step_s)
    everything = uniform_plans(problem)
    assert step_s(best) == min(arrival_step_s(problem, plan) for plan in everything)
    assert MIN_SIMULATED <= len(asked) - 1 <= len(everything)
    assert best == tuned_uniform(baseline_problem(tps=(1, 2, 4)), step_s)


def test_no_uniform_plan_fits():
    problem = baseline_problem(memory_bytes=20 * 2**20)
    assert uniform_plans(problem) == []
    assert tuned_uniform(problem, lambda _: 1.0) is None
    with pytest.raises(InfeasiblePlanError, match=r"no uniform plan with tp \[2\] on 8 processes fits"):
        default_plan(problem)


def test_default_plan_takes_the_largest_tp_the_least_pp_and_one_sample_per_microbatch():
    roomy = default_plan(baseline_problem())
    assert roomy.modules[0].parallel == roomy.modules[-1].parallel == ParallelSpec(2, 1, 4)
    assert (roomy.num_microbatches, roomy.modules[0].recompute) == (6, False)
    # Without ZeRO-1 the state of the whole model, (4 * 2 layers + 2 edges) * 18 bytes / 2, leaves too little room for
    # activations, even recomputed; two stages fit if they recompute.
    tight = default_plan(baseline_problem(memory_bytes=118 * 2**20, shard_optimizer=False))
    assert tight.modules[-1].parallel == ParallelSpec(2, 2, 2)
    assert (tight.num_microbatches, tight.modules[0].recompute) == (12, True)


def test_default_plan_has_no_more_replicas_than_samples():
    found = default_plan(baseline_problem(num_processes=64))
    assert (found.modules[-1].parallel, found.num_microbatches) == (ParallelSpec(2, 2, 16), 1)
