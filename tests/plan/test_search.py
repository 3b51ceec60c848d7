import dataclasses
import math
import statistics
from typing import Any

import pytest

from dflop import units
from dflop.cost.link_costs import ALL_REDUCE, P2P
from dflop.cost.model import CostModel
from dflop.emit.mimo_rules import MimoRules, mimo_problems
from dflop.errors import InfeasiblePlanError
from dflop.plan.rank import MOVES_PER_SAMPLE, arrival_step_s
from dflop.plan.search import optimize, plan_problem
from dflop.plan.space import Problem, SearchSpace
from dflop.progress import unseen
from dflop.records import LLM, ParallelSpec, Plan
from dflop.schedule.policies import Effort
from dflop.schedule.step_scheduler import schedule_step
from tests.bench.blind import blind_plan
from tests.builders import make_cluster, make_cost, make_link, make_sample, make_specs, random_batch, with_layers
from tests.plan.problems import make_problem, uniform_plans
from tests.plan.whole_drafts import inline_choices

ENCODERS = ("vision", "audio")
BATCHES = tuple(random_batch(24, seed=seed) for seed in range(2))


def problem(**changes) -> Problem:
    space = SearchSpace(
        share_ranks=changes.pop("share_ranks", (False,)), microbatches=changes.pop("microbatches", (2, 4))
    )
    cost = changes.pop("cost", make_cost(*ENCODERS)).extrapolating()
    made = Problem("run", make_specs(*ENCODERS), make_cluster(4), cost, BATCHES, 24, snapshot_seq=3, space=space)
    return dataclasses.replace(made, **changes)


def plans(progress=None, top=6, at=unseen, **changes) -> tuple[Plan, ...]:
    return plan_problem(problem(**changes), top=top, progress=progress, at=at)


def test_plans_are_ranked_placed_and_explained():
    lines, seen = list[str](), list[tuple[str, int, int]]()
    found = plans(progress=lines.append, at=lambda *at: seen.append(at))
    searched = [f"{what}, by the number of microbatches" for what in ("searching layouts", "covering modules")]
    simulated = [
        f"simulating {what}"
        for what in ("plans", "plans on more batches", "the best plans with the long search, by the batch")
    ]
    sizes = {what: n for what, _, n in seen}
    assert list(sizes) == [*searched, *simulated]
    assert seen == [(what, k, n) for what, n in sizes.items() for k in range(n + 1)]
    assert [sizes[what] for what in searched] == [2, 2]
    assert 6 == sizes[simulated[0]] > sizes[simulated[1]] > 0
    assert sizes[simulated[2]] == len(BATCHES)
    assert [line.partition(":")[0] for line in lines[:-2]] == ["2 microbatches", "4 microbatches"]
    assert lines[-1] == f"simulated 6 plans on 2 global batches, {len(found)} fit in memory"
    assert lines[-2].startswith("proven for the planning formula, not for simulated steps: no plan is below")
    assert [p.candidate_rank for p in found] == list(range(len(found)))
    assert [p.predicted_step_s for p in found] == sorted(p.predicted_step_s for p in found)
    assert len({p.plan_id for p in found}) == len(found) == 6
    for plan in found:
        assert [m.module for m in plan.modules] == ["vision", "audio", LLM]
        next_rank = 0
        for m in plan.modules:
            assert m.first_rank == next_rank
            assert sum(m.layers_per_stage) == 4
            assert len(m.stage_memory_bytes) == m.parallel.pp
            next_rank += m.parallel.num_processes
        assert next_rank == plan.num_processes <= 4
        assert plan.predicted_step_s <= plan.baseline_step_s
        assert plan.table_ids == ("vision-tp1", "audio-tp1", "llm-tp1")
        assert (plan.snapshot_seq, plan.global_batch_size) == (3, 24)
    assert found[0].reason.startswith("fastest of 6 simulated plans")
    assert found[1].reason.endswith("the step time of the chosen plan, estimated by a quick search")
    for number in (4, 100):
        best, *others = plans(cluster=make_cluster(number), share_ranks=(True,))
        assert (f"It uses {best.num_processes} of {number} processes." in best.reason) == (best.num_processes < number)
        for plan in others:
            used = f"; uses {plan.num_processes} of {number} processes"
            assert plan.reason.endswith(used) == (plan.num_processes < number)
    assert best.num_processes < number


def test_prediction_is_the_scheduler_on_the_batches_under_contention():
    best = plans()[0]
    cost, effort = make_cost(*ENCODERS), Effort(max_simulations=MOVES_PER_SAMPLE * len(BATCHES[0]))
    steps = [
        schedule_step(run_id="run", step=0, plan=best, batch=batch, cost=cost, max_concurrency=2, effort=effort)
        for batch in BATCHES
    ]
    assert best.predicted_step_s == pytest.approx(statistics.fmean(s.predicted_step_s for s in steps) + best.sync_s)
    assert best.baseline_step_s == pytest.approx(statistics.fmean(s.arrival_step_s for s in steps) + best.sync_s)
    free = plans(cluster=make_cluster(4, num_cores=4))[0]
    assert free.predicted_step_s < best.predicted_step_s


def test_same_input_same_plans_and_ids_ignore_the_run():
    first = plans()
    assert plans() == first
    assert [p.plan_id for p in plans(run_id="other")] == [p.plan_id for p in first]
    assert plans(microbatches=(4, 2, 2)) == first


def test_model_without_encoders():
    llm_alone = {"specs": make_specs(), "cost": make_cost(), "batches": [random_batch(24, encoders=())]}
    assert [m.module for m in plans(**llm_alone, cluster=make_cluster(2))[0].modules] == [LLM]


@pytest.mark.parametrize("share_ranks", [(True,), (False,), (False, True)])
def test_no_plan_is_below_the_bound_of_any_number_of_microbatches(share_ranks):
    counts, lines = (1, 2, 3, 4, 5, 6, 8, 12), list[str]()
    task = problem(share_ranks=share_ranks, microbatches=counts)
    planned = optimize(task, top=60, progress=lines.append)
    bounds_s = {p.num_microbatches: p.bound_s for p in planned.programs}
    assert tuple(bounds_s) == counts
    for plan in planned.plans:
        if math.isfinite(plan.formula_step_s):  # not of the data-blind one
            assert plan.formula_step_s >= bounds_s[plan.num_microbatches] * (1 - 1e-9)
    best_s = min(p.objective_s for p in planned.programs)
    assert best_s == pytest.approx(min(bounds_s.values()), rel=1e-8)
    first = planned.plans[0]
    beyond = units.percent(first.formula_step_s / best_s - 1)
    said = "it is the proven optimum" if first.formula_step_s == best_s else f"{beyond} more than the proven bound"
    assert said in first.reason


def test_what_is_proven_holds_for_chains_of_every_cp():
    task = problem(share_ranks=(True,), microbatches=(1, 2, 4, 8))
    task = dataclasses.replace(task, space=dataclasses.replace(task.space, cps=(1, 2, 4)))
    planned = optimize(task, top=60)
    every = {p.num_microbatches: inline_choices(task, p.num_microbatches, top=None) for p in planned.programs}
    assert {plan.module(LLM).parallel.cp for of in every.values() for _, plan in of} == {1, 2, 4}
    least_s = {m: min(value_s for value_s, _ in of) for m, of in every.items()}
    assert all(p.bound_s <= least_s[p.num_microbatches] * (1 + 1e-9) for p in planned.programs)
    assert min(p.objective_s for p in planned.programs) == min(least_s.values())
    assert min(p.bound_s for p in planned.programs) == pytest.approx(min(least_s.values()), rel=1e-8)


def test_ranks_share_a_sample_that_none_has_room_for():
    """Tensor parallelism holds it, too, and pays for messages in every layer."""
    batch = [make_sample(i, 12_000 if i == 0 else 90) for i in range(24)]
    how: dict[str, Any] = {"num_processes": 2, "max_pp": 1, "recompute": (False,), "shard_parameters": (False,)}
    how |= {"share_ranks": (True,), "microbatches": (1, 2, 4), "batches": [batch], "memory_bytes": 600 * 10**6}
    links = [make_link(ALL_REDUCE, 2, 1, 1e-4, 2e7), make_link(P2P, 2, 1, 1e-5, 1e8)]

    def best(**changes: Any) -> Plan:
        return plan_problem(make_problem(tps=(1, 2), links=links, **how | changes), top=8)[0]

    alone, shared = best(cps=(1,)), best(cps=(1, 2))
    assert alone.module(LLM).parallel == ParallelSpec(2, 1, 1)
    assert shared.module(LLM).parallel == ParallelSpec(1, 1, 1, cp=2)
    assert shared.predicted_step_s < 0.8 * alone.predicted_step_s
    assert "cp 2" in shared.reason
    assert best(cps=(1, 2), memory_bytes=10**9).predicted_step_s <= best(memory_bytes=10**9).predicted_step_s
    with pytest.raises(InfeasiblePlanError):
        best(cps=(1,), memory_bytes=450 * 10**6)
    assert best(cps=(1, 2), memory_bytes=450 * 10**6).module(LLM).parallel.cp == 2


@pytest.mark.parametrize("share_ranks", [(True,), (False,), (False, True)])
def test_only_layouts_asked_for(share_ranks):
    found = plans(share_ranks=share_ranks, cluster=make_cluster(4, num_cores=4), top=20)
    assert {len(p.grids) for p in found} <= {(True,): {1}, (False,): {3}}.get(share_ranks, {1, 2, 3})
    for plan in found:
        if len(plan.grids) == 1:
            assert len({m.parallel for m in plan.modules}) == 1
            assert {m.first_rank for m in plan.modules} == {0}
            assert plan.num_processes <= 4
        assert all(sum(m.layers_per_stage) == 4 for m in plan.modules)


def test_order_of_modules_candidates_and_counts_does_not_matter():
    first = plans(share_ranks=(False, True), microbatches=(1, 2, 3, 4, 6))
    shuffled = plans(
        share_ranks=(True, False),
        microbatches=(6, 3, 1, 4, 2),
        specs=(*reversed(make_specs(*ENCODERS)[:-1]), make_specs(*ENCODERS)[-1]),
    )
    assert shuffled[0].predicted_step_s == pytest.approx(first[0].predicted_step_s, rel=0.02)
    tables = make_cost(*ENCODERS).tables
    assert plans(share_ranks=(False, True), microbatches=(1, 2, 3, 4, 6), cost=CostModel(reversed(tables))) == first


@pytest.mark.parametrize("seed", range(2))
def test_never_worse_than_the_data_blind_plans_under_the_simulator(seed):
    batches = tuple(random_batch(24, seed=10 * seed + i) for i in range(2))
    cost = make_cost(*ENCODERS, scale={LLM: 2.0}).extrapolating()
    alone = make_cluster(4, num_cores=4)
    best = plans(share_ranks=(False, True), batches=batches, cost=cost, cluster=alone, microbatches=())[0]
    problem = Problem("run", make_specs(*ENCODERS), alone, cost, batches, 24, 0, SearchSpace(recompute=(False,)))
    uniform = [arrival_step_s(problem, plan) for plan in uniform_plans(problem)]
    assert best.uniform_step_s == pytest.approx(min(uniform))
    assert best.predicted_step_s <= min(uniform)
    assert best.predicted_step_s <= arrival_step_s(problem, blind_plan(problem))


def test_memory_that_forces_more_processes_than_there_are():
    specs = tuple(with_layers(s, num_params=40_000_000) if s.module == LLM else s for s in make_specs(*ENCODERS))
    limits = {"specs": specs, "microbatches": (4,)}
    with pytest.raises(InfeasiblePlanError, match=r"module `llm` needs .* more per rank"):
        plans(cluster=make_cluster(4, memory_bytes=900 * 2**20), **limits)
    deep = plans(cluster=make_cluster(6, memory_bytes=900 * 2**20), **limits)[0]
    assert deep.module(LLM).parallel.pp == 4
    assert max(max(m.stage_memory_bytes) for m in deep.modules) <= 0.9 * 900 * 2**20


def test_modules_that_fit_alone_but_not_together():
    # Vision needs two ranks for its activations, the LLM two stages for its own: four processes, not three.
    batch = [make_sample(i, 100, [("vision", 100)]) for i in range(24)]
    cluster = make_cluster(3, memory_bytes=int(200e6 / 0.9))
    with pytest.raises(InfeasiblePlanError, match=r"module `vision` needs .* more per rank") as failure:
        plans(specs=make_specs("vision"), cluster=cluster, batches=[batch], microbatches=(1,))
    assert "1 more process" in failure.value.hint


def test_another_trainers_rules_are_constraints_of_the_search():
    model = {"cluster": make_cluster(8, num_cores=8), "specs": make_specs("vision"), "cost": make_cost("vision")}
    found = plans(space=SearchSpace(rules=MimoRules()), **model)
    assert {len(p.grids) for p in found} == {2}
    for plan in found:
        assert mimo_problems(plan, 8) == []
        assert plan.predicted_step_s == plan.baseline_step_s
    assert any(mimo_problems(plan, 8) for plan in plans(**model))
    for plan in plans(space=SearchSpace(shard_parameters=(True,)), **model):
        assert all(m.parameter_shards > 1 or m.parallel.dp == 1 for m in plan.modules), "as configured"
    for plan in plans(space=SearchSpace(rules=MimoRules(), shard_parameters=(True,)), **model):
        assert mimo_problems(plan, 8) == [], "that trainer shares no parameters"
