from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.cost.link_costs import P2P
from dflop.cost.model import has_edge
from dflop.plan.chain import Chain
from dflop.plan.drafts import charged, fits
from dflop.plan.grid_bytes import SLACK, chain_peaks, largest_loads
from dflop.plan.partition import best_cuts, free_cuts, range_seconds
from dflop.plan.runnable import check_plan
from dflop.plan.space import Problem
from dflop.plan.stage_params import chain_params
from dflop.records import LLM, ParallelSpec, Plan
from tests.bench.cases import CASES, make_setting
from tests.bench.mixtures import MIXTURES
from tests.builders import make_link, with_layers
from tests.plan.problems import make_problem
from tests.plan.whole_drafts import inline_choices


def stage_seconds(seconds, cuts) -> list[float]:
    return [sum(seconds[a:b]) for a, b in itertools.pairwise(cuts)]


def every_cut(num_units: int, num_stages: int):
    for inner in itertools.combinations(range(1, num_units), num_stages - 1):
        yield (0, *inner, num_units)


UNITS = st.lists(st.integers(1, 50).map(float), min_size=1, max_size=9)


@given(UNITS, st.integers(1, 5))
def test_cuts_are_the_best_of_all(seconds, num_stages):
    if num_stages > len(seconds):
        return
    cuts = free_cuts(tuple(seconds), num_stages)
    assert cuts in set(every_cut(len(seconds), num_stages))

    def badness(c) -> tuple[float, float]:
        stages = stage_seconds(seconds, c)
        return max(stages), sum(s**2 for s in stages)

    assert badness(cuts) == min(badness(c) for c in every_cut(len(seconds), num_stages))


@given(UNITS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_cuts_keep_to_what_is_allowed(seconds, num_stages, rng):
    if num_stages > len(seconds):
        return
    n = len(seconds) + 1
    allowed = np.array([rng.random() < 0.6 for _ in range(num_stages * n * n)]).reshape(num_stages, n, n)
    possible = [
        c
        for c in every_cut(len(seconds), num_stages)
        if all(allowed[k, a, b] for k, (a, b) in enumerate(itertools.pairwise(c)))
    ]
    cuts = best_cuts(np.where(allowed, range_seconds(seconds), np.inf))
    if not possible:
        assert cuts is None
    else:
        assert cuts in possible
        assert max(stage_seconds(seconds, cuts)) == min(max(stage_seconds(seconds, c)) for c in possible)


def check_invariants(problem: Problem, plan: Plan) -> None:
    """What the record promises of an inline plan."""
    assert len(plan.grids) == 1
    parallel = plan.module(LLM).parallel
    assert {m.parallel for m in plan.modules} == {parallel}
    assert {m.first_rank for m in plan.modules} == {0}
    assert plan.num_processes == parallel.num_processes <= problem.cluster.num_processes
    assert parallel.cp == 1 or problem.cluster.num_processes_per_node % parallel.group_size == 0
    assert all((m.cost_growth > 0) == (parallel.cp > 1) for m in plan.modules)
    assert plan.num_microbatches * parallel.dp <= problem.global_batch_size
    holders = []
    for m in plan.modules:
        assert len(m.layers_per_stage) == parallel.pp
        assert sum(m.layers_per_stage) == problem.spec(m.module).num_layers
        holders.append([stage for stage, layers in enumerate(m.layers_per_stage) if layers])
        if problem.spec(m.module).max_pp == 1:
            assert len(holders[-1]) == 1
    assert all(before[-1] <= after[0] for before, after in itertools.pairwise(holders))
    assert {stage for stages in holders for stage in stages} == set(range(parallel.pp))
    assert fits(problem, plan)


@pytest.mark.parametrize(("encoders", "max_pp"), [((), 4), (("vision",), None), (("vision", "audio"), 4)])
@pytest.mark.parametrize("cps", [None, (1, 2, 4), (1, 2, 3)])
def test_every_choice_is_a_valid_plan(encoders, max_pp, cps):
    problem = make_problem(*encoders, num_processes=6, tps=(1, 2), max_pp=max_pp, cps=cps)
    found = inline_choices(problem, 4, top=None)
    for _, plan in found:
        check_invariants(problem, plan)
    values = [value for value, _ in found]
    assert values == sorted(values)
    assert values == [plan.formula_step_s for _, plan in found]
    pps = range(1, 5)  # the LLM's max_pp
    expected = {
        (tp, pp, dp, cp, 1)
        for tp in (1, 2)
        for cp in cps or (1,)
        for pp in pps
        for dp in range(1, 7)
        if tp * cp * pp * dp <= 6 and (cp == 1 or 6 % (tp * cp) == 0)
    }
    assert {dataclasses.astuple(p.module(LLM).parallel) for _, p in found} == expected
    assert len(found) == len(expected)
    assert inline_choices(problem, 4, top=1) == found[:1]


def test_first_layers_that_belong_together_are_on_one_stage():
    problem = make_problem("vision", num_processes=6, max_pp=4)
    vision, llm = problem.specs

    def first_parts(num_entry_layers: int) -> set[int]:
        specs = (vision, dataclasses.replace(llm, num_entry_layers=num_entry_layers))
        plans = [plan for _, plan in inline_choices(dataclasses.replace(problem, specs=specs), 4, top=None)]
        for plan in plans:
            check_plan(plan, specs)
        assert {plan.module(LLM).parallel.pp for plan in plans} == {1, 2, 3, 4}
        return {next(n for n in plan.module(LLM).layers_per_stage if n) for plan in plans}

    assert min(first_parts(1)) < 3
    assert min(first_parts(3)) == 3


def seconds(problem: Problem, name: str, load, **how):
    return sum(problem.cost.module_seconds(name, load, **how))


def chain_seconds(problem: Problem, plan: Plan, loads: dict[str, tuple[float, ...]]) -> np.ndarray:
    """Per stage, one microbatch of these loads."""
    found = np.zeros(plan.module(LLM).parallel.pp)
    for m in plan.modules:
        how = {"mode": m.parallel.mode.recomputing(m.recompute)}
        for k, n in enumerate(m.layers_per_stage):
            edge = has_edge(m.layers_per_stage, k)
            found[k] += seconds(problem, m.module, loads[m.module], num_layers=n, edge=edge, **how)
    return found


def formula_by_hand(problem: Problem, plan: Plan) -> float:
    """J of a chain, stage by stage and scenario by scenario."""
    steps = []
    for batch in problem.batches:
        samples = [{s.module: dataclasses.astuple(x.load(s.module)) for s in problem.specs} for x in batch]
        whole_s = [
            sum(seconds(problem, s.module, x[s.module], num_layers=s.num_layers, edge=True) for s in problem.specs)
            for x in samples
        ]
        num_buckets = min(len(batch), plan.num_microbatches * plan.module(LLM).parallel.dp)
        mean = {s.module: tuple(np.sum([x[s.module] for x in samples], axis=0) / num_buckets) for s in problem.specs}
        average = chain_seconds(problem, plan, mean)
        heaviest = chain_seconds(problem, plan, samples[int(np.argmax(whole_s))])
        if len(average) == 1:
            steps.append(max(plan.num_microbatches * average[0], heaviest[0]))
        else:
            fill_s = np.maximum(average, heaviest).sum()
            steps.append(fill_s + (plan.num_microbatches - 1) * max(average))
    return sum(steps) / len(steps) + plan.sync_s


def test_formula_of_a_chain_by_hand():
    problem = make_problem(
        "vision", "audio", num_processes=6, tps=(1, 2), max_pp=4, optimizer_s_per_param=1e-9, cps=(1, 3),
        links=[make_link(P2P, 2, 1, 1e-5, 1e8)],
    )  # fmt: skip
    for value, plan in inline_choices(problem, 3, top=None):
        assert value == pytest.approx(formula_by_hand(problem, plan), rel=1e-12)


def test_layers_run_again_only_where_microbatches_may_not_fit_otherwise():
    problem = make_problem("vision", num_processes=4, memory_bytes=200 * 10**6)
    plans = [p for _, p in inline_choices(problem, 4, top=None)]
    assert all(fits(problem, p) for p in plans)
    assert {p.module(LLM).recompute for p in plans} == {False, True}
    assert any(p.module("vision").recomputed for p in plans), "as few layers as memory asks for"
    for plan in plans:
        largest = [SLACK * x for x in largest_loads(problem, plan, plan.modules)]
        none = [*plan.modules[:-1], dataclasses.replace(plan.module(LLM), recompute=False, recompute_tokens=())]
        asked = chain_peaks(problem, plan, none, largest).max() > problem.usable_bytes
        limited = charged(problem, plan).module(LLM)
        assert bool(plan.module(LLM).recompute_tokens) == asked >= bool(limited.recompute_tokens)
        assert limited.recomputed == ()
    assert inline_choices(make_problem("vision", num_processes=3, memory_bytes=10**6), 8) == []


@pytest.mark.parametrize("memory_mb", [250, 275, 300])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_chains_are_cut_for_the_layers_that_run_again(memory_mb, pp):
    """Cut for the time without them, the first stage takes 6 % longer: it runs the most again."""
    problem = make_problem(
        "vision", num_processes=4, max_pp=4, memory_bytes=memory_mb * 10**6, shard_parameters=(False,)
    )
    vision, llm = problem.specs
    problem = dataclasses.replace(problem, specs=(vision, with_layers(llm, 16)))
    chain = Chain.of(problem, 1, 8)
    layers = chain._layers(np.array(list(every_cut(chain.unit_layers.shape[1], pp))))
    dp, shards = np.full(layers.shape[1], 4 // pp), np.ones(layers.shape[1], dtype=int)
    states = chain.memory.states(chain_params(chain.specs, layers, chain.mode), dp, shards)
    again, fit = chain.memory.recomputed(layers, states, dp)
    least_s = chain._grids(states, layers, again, dp, shards).alone_s[fit].min()
    of_grid = [
        v for v, p in inline_choices(problem, 8, top=None) if p.module(LLM).parallel == ParallelSpec(1, pp, dp[0])
    ]
    assert min(of_grid) == pytest.approx(least_s, rel=0.01)


def test_all_layers_run_again_only_where_that_fits_too():
    """The last layer of a stage to run again saves less than a layer at work needs: 0.1 % more than an A100 has."""
    problem = make_setting(CASES[1], MIXTURES["main"]).problem
    plans = [plan for _, plan in inline_choices(problem, 1, top=15)]
    assert any(plan.module(LLM).recompute_tokens for plan in plans)
    assert all(fits(problem, plan) for plan in plans)


@pytest.mark.parametrize("memory_mb", [260, 270, 280, 290, 300])
def test_an_average_microbatch_runs_again_what_it_needs_with_encoders_as_the_plan_has_them(memory_mb):
    """A layer of the LLM less is beyond memory; by seconds a byte of its average load encoders would go first."""
    problem = make_problem("vision", num_processes=2, memory_bytes=memory_mb * 10**6, shard_parameters=(False,))
    chain = Chain.of(problem, 1, 2)
    layers, dp = np.array([[[spec.num_layers]] for spec in chain.specs]), np.array([2])
    states = chain.memory.states(chain_params(chain.specs, layers, chain.mode), dp, np.ones(1, dtype=int))
    again, fit = chain.memory.recomputed(layers, states, dp)
    usual = chain.memory.usual(states, layers, again, dp)
    assert fit.all()
    assert usual[:-1].tolist() == again[:-1].tolist()
    is_over = [
        chain.memory.is_over(chain.memory.held(states, layers, of, dp, usual=True)).any()
        for of in (usual, usual - [[[0]], [[1]]])
    ]
    assert is_over == [False, True]
