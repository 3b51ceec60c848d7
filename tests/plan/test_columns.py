"""Columns against the formula stage by stage, and plans of covers against what memory and the engine allow."""

import math
from collections.abc import Iterator

import numpy as np
import pytest

from dflop.cost.link_costs import ALL_REDUCE
from dflop.cost.model import has_edge
from dflop.plan.columns import Columns, combined
from dflop.plan.drafts import draft, fits
from dflop.plan.grid_search import grids_apart, grids_of_encoder, grids_with_llm, whole_depths
from dflop.plan.runnable import check_plan
from dflop.plan.space import Problem
from dflop.records import LLM, ModulePlan, Plan, RunMode
from tests.builders import make_link
from tests.plan.problems import make_problem


def columns_of(problem: Problem, num_microbatches: int) -> Columns:
    grids = [
        *grids_with_llm(whole_depths(problem, num_microbatches)),
        *grids_apart(problem, num_microbatches, math.inf),
    ]
    names = [spec.module for spec in problem.specs]
    found = Columns.of(names, num_microbatches, problem.cluster.num_processes, grids)
    assert found is not None
    return found


def every_plan(problem: Problem, num_microbatches: int) -> Iterator[tuple[float, Plan]]:
    """(J, plan) of every cover that memory and processes allow."""
    columns = columns_of(problem, num_microbatches)
    for parts in columns.parts:
        covers = combined([np.flatnonzero(columns.subset == part) for part in parts])
        for value_s, cover in columns.best(covers, len(covers)):
            yield value_s, draft(problem, num_microbatches, columns.choices(cover), value_s, with_caps=False)


def grid_seconds(problem: Problem, plan: Plan, grid: tuple[ModulePlan, ...], s: int) -> tuple[float, float]:
    """(tau, fill) of a grid in one scenario."""
    num, has_llm, average, heaviest = plan.num_microbatches, grid[-1].module == LLM, np.zeros(1), np.zeros(1)
    loads = problem.sample_loads if has_llm else problem.loads
    units = problem.heaviest_units([problem.spec(m.module) for m in grid])
    for m in grid:
        of_load = []
        for load in (loads[m.module].per_microbatch(num * m.parallel.dp)[:, s], units[m.module][:, s]):
            stages = []
            for stage, (layers, again) in enumerate(zip(m.layers_per_stage, m.num_recomputed, strict=True)):
                asked, edge = (m.module, load), has_edge(m.layers_per_stage, stage)
                how = {"mode": RunMode(m.parallel.tp), "num_layers": layers, "edge": edge}
                plain = sum(problem.cost.module_seconds(*asked, **how)) if layers else 0.0
                modes = [RunMode(m.parallel.tp, recompute=share) for share in (True, False)]
                longer = [sum(problem.cost.module_seconds(*asked, mode, num_layers=1, edge=False)) for mode in modes]
                stages.append(plain + again * (longer[0] - longer[1]))
            of_load.append(np.array(stages))
        average, heaviest = average + of_load[0], heaviest + of_load[1]
    if has_llm and len(average) == 1:
        return average[0], max(num * average[0], heaviest[0]) - (num - 1) * average[0]
    return max(average), np.maximum(average, heaviest).sum()


def formula_by_hand(problem: Problem, plan: Plan) -> float:
    """J of a plan, grid by grid and scenario by scenario."""
    steps = []
    for s in range(len(problem.batches)):
        *encoders, llm = (grid_seconds(problem, plan, grid, s) for grid in plan.grids)
        tau_s = max(tau for tau, _ in (*encoders, llm))
        steps.append(max((fill for _, fill in encoders), default=0.0) + llm[1] + (plan.num_microbatches - 1) * tau_s)
    return sum(steps) / len(steps) + plan.sync_s


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_columns_hold_the_formula_of_every_plan_and_the_engine_runs_it(num_microbatches):
    problem = make_problem("vision", "audio", num_processes=5, tps=(1, 2), shard_parameters=(False,))
    plans = list(every_plan(problem, num_microbatches))
    assert {len(plan.grids) for _, plan in plans} == {1, 2, 3}
    for value_s, plan in plans[:: max(1, len(plans) // 60)]:
        check_plan(plan, problem.specs)
        assert fits(problem, plan)
        assert value_s == pytest.approx(formula_by_hand(problem, plan), rel=1e-12)


def test_where_others_feed_it_the_llm_begins_on_the_first_stage():
    problem = make_problem("vision", "audio", num_processes=6, max_pp=4, shard_parameters=(False,))
    mixed = [plan for _, plan in every_plan(problem, 2) if len(plan.grids) == 2]
    assert {plan.module(LLM).parallel.pp for plan in mixed} == {1, 2, 3, 4}
    for plan in mixed:
        assert plan.module(LLM).layers_per_stage[0] > 0
        check_plan(plan, problem.specs)


@pytest.mark.parametrize(("share_ranks", "num_grids"), [((False,), {3}), ((True,), {1}), ((False, True), {1, 2, 3})])
def test_modules_share_ranks_only_where_that_is_allowed(share_ranks, num_grids):
    problem = make_problem("vision", "audio", num_processes=3, share_ranks=share_ranks)
    assert {len(plan.grids) for _, plan in every_plan(problem, 2)} == num_grids


@pytest.mark.parametrize("memory_mb", [150, 180, 250])
def test_an_encoder_that_saves_more_memory_stands_in_front_of_a_deeper_llm(memory_mb):
    problem = make_problem("vision", num_processes=6, memory_bytes=memory_mb * 10**6)
    seen: dict[int, list[tuple[bool, bool, float]]] = {}
    for grids in grids_of_encoder(problem, 6, "vision"):
        for k in range(len(grids)):
            way = bool(grids.shards[k] > 1), bool(grids.num_recomputed[k]), float(grids.max_llm_pp[k])
            seen.setdefault(int(grids.dp[k]), []).append(way)
    assert seen
    for ways in seen.values():
        for (shares, again, depth), (less_shares, less_again, less_depth) in (
            (a, b) for a in ways for b in ways if a != b and a[0] >= b[0] and a[1] >= b[1]
        ):
            assert depth > less_depth, (shares, again, less_shares, less_again)


def test_synchronisation_and_optimizer_are_part_of_the_formula_except_for_frozen_modules():
    link = make_link(ALL_REDUCE, 2, 1, 0.1, 1e9)
    how = {"num_processes": 4, "shard_parameters": (False,)}
    plain = make_problem("vision", **how)
    slow = make_problem("vision", links=[link], optimizer_s_per_param=1e-8, **how)
    frozen = make_problem("vision", links=[link], optimizer_s_per_param=1e-8, frozen=True, **how)
    (of_plain,), (of_slow,), (of_frozen,) = (grids_of_encoder(p, 2, "vision") for p in (plain, slow, frozen))
    assert not of_plain.sync_s.any()
    assert not of_frozen.sync_s.any()
    # 4 layers of a million parameters and an edge of two; states are shared out: a sum in 32 bit, a broadcast in 16.
    by_dp = dict(zip(of_slow.dp.tolist(), of_slow.sync_s.tolist(), strict=True))
    assert by_dp[1] == pytest.approx(6e6 * 1e-8)
    assert by_dp[2] == pytest.approx(6e6 * 1e-8 / 2 + 0.1 + (4 + 2) / 2 * 6e6 / 1e9)
