"""What the planner may choose for a family is what the engine can build: every seat of every plan, of tiny models."""

import dataclasses
import math
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dflop.config.sections import StageConfig
from dflop.cost.analytic import HOST_FRAC, analytic_cost_tables
from dflop.cost.devices import A100, H100
from dflop.cost.identity import bytes_per_value
from dflop.cost.link_costs import HOST_COPY
from dflop.cost.model import CostModel
from dflop.data.distribution import sample_batches
from dflop.errors import ConfigError
from dflop.models import attention
from dflop.parallel.stages import build_stages
from dflop.parallel.topology import seats
from dflop.plan.drafts import draft
from dflop.plan.grid_choice import GridChoice
from dflop.plan.grid_search import grids_apart
from dflop.plan.memory import stage_bytes
from dflop.plan.runnable import check_plan
from dflop.plan.space import Problem, SearchSpace
from dflop.plan.stage_params import stage_params
from dflop.records import LLM, Plan, SampleShape
from dflop.run.batches import GlobalBatches
from dflop.run.plan_scope import PlanBasis, basis_of, planned_steps, scenario_batches
from dflop.schedule.step_scheduler import schedule_step
from dflop.steps.planning import plan_run, planning_task, run_task, tables_of
from dflop.steps.reporting import plan_page
from dflop.store.console import query
from dflop.train.stages import pieces_of
from tests.builders import (
    make_cluster,
    make_corrections,
    make_cost,
    make_inline_plan,
    make_link,
    make_sample,
    random_batch,
)
from tests.jobs.configs import make_config
from tests.jobs.training import fresh, set_config
from tests.models.tiny_families import CASES, Case
from tests.plan.problems import uniform_plans
from tests.plan.whole_drafts import inline_choices
from tests.schedule.steps import with_reruns
from tests.store.asking import fill

NUM_PROCESSES, NUM_MICROBATCHES, BATCH_SIZE = 8, 2, 16
UNLIKE = ("Qwen3-VL", "Qwen2-Audio", "InternVL with InternViT-6B")
"""Features behind the first layers; a tower for audio; one that no two ranks can share. Others are in a lane."""


def problem_of(case: Case) -> Problem:
    """Batches of the case's samples, data-sheet costs, everything allowed."""
    samples = [case.sample(n) for n in range(len(case.samples))]
    shapes = [
        SampleShape("data", i, str(i), 6, 5, len(s.input_ids), tuple(s.items))
        for i, s in enumerate(samples[k % len(samples)] for k in range(BATCH_SIZE))
    ]
    specs = case.family.specs()
    cost = CostModel(analytic_cost_tables(specs, A100, profile_key="test"), specs=specs, extrapolate=True)
    cluster = dataclasses.replace(make_cluster(NUM_PROCESSES, num_cores=NUM_PROCESSES), device="cuda")
    space = SearchSpace(microbatches=(NUM_MICROBATCHES,))
    return Problem("run", specs, cluster, cost, (shapes,), BATCH_SIZE, 0, space)


def every_plan(problem: Problem) -> Iterator[Plan]:
    """Every inline and uniform plan, and others in which each grid of each subset of the modules occurs."""
    yield from (plan for _, plan in inline_choices(problem, NUM_MICROBATCHES, top=None))
    yield from uniform_plans(problem)
    found: dict[tuple[str, ...], list[GridChoice]] = {}
    for grids in grids_apart(problem, NUM_MICROBATCHES, math.inf):
        names = tuple(spec.module for spec in grids.specs)
        found.setdefault(names, []).extend(grids.choice(k) for k in range(len(grids)))
    for names, choices in found.items():
        others = [(s.module,) for s in problem.specs if s.module not in names]
        if LLM not in names:  # behind it the LLM alone
            others = [name for name in others if name in found]
        for choice in choices:
            yield draft(problem, NUM_MICROBATCHES, [choice, *(found[name][0] for name in others)], 0.0)


def stand_in(degree: int) -> SimpleNamespace:
    """A group that can be asked but not used."""
    return SimpleNamespace(size=lambda: degree, rank=lambda: degree - 1)


@pytest.mark.parametrize(
    "name", [n if n in UNLIKE else pytest.param(n, marks=pytest.mark.lane("layouts")) for n in CASES]
)
def test_every_plan_that_the_planner_may_make_can_be_built(name):
    case, problem = CASES[name], problem_of(CASES[name])
    plans = list(every_plan(problem))
    assert {len(plan.grids) for plan in plans} >= {1, len(problem.specs)}
    built = set()
    for plan in plans:
        check_plan(plan, problem.specs)
        for seat in seats(plan):
            tp = plan.module(seat.module).parallel.tp
            if (tp, seat.parts) not in built:
                built.add((tp, seat.parts))
                stages, _ = build_stages(
                    case.build(), case.family, pieces_of(plan, seat), torch.device("cpu"), kernel=attention.SDPA,
                    group=stand_in(tp),
                )  # fmt: skip
                assert len(stages) == len(seat.parts)
    assert max(tp for tp, _ in built) == max(tp for s in problem.specs for tp in s.tp_choices)
    for spec in problem.specs:
        depths = {plan.module(spec.module).parallel.pp for plan in plans if len(plan.grids) > 1}
        assert max(depths) == min(spec.max_pp, NUM_PROCESSES - 1)


def shape(index: int, num_tokens: int, weight: float = 1.0) -> SampleShape:
    return dataclasses.replace(make_sample(index, num_tokens), weight=weight)


@pytest.fixture
def ordered(tmp_path):
    """Sixty-four samples, short ones in the first half of the file, read through a small window."""
    config = make_config(
        tmp_path, "plan.global_batch_size=4", "plan.num_scenarios=3", "train.num_steps=16", "dataset.shuffle_window=8"
    )
    return config, [shape(i, 10 if i < 32 else 1000) for i in range(64)]


@pytest.mark.parametrize(
    "way", [{}, {"recompute": True}, {"recompute": True, "recomputed": (2,)},
            {"recompute": True, "recompute_tokens": ((60, 90, 400),)}],
)  # fmt: skip
def test_a_plan_names_the_cost_tables_that_its_steps_are_scheduled_with(way):
    plan, cost = make_inline_plan(2, modules=(LLM,)), with_reruns(make_cost())
    plan = dataclasses.replace(plan, modules=(dataclasses.replace(plan.module(LLM), **way),))
    of = {"run_id": "run", "step": 0, "plan": plan, "batch": random_batch(8, encoders=()), "policy": "quick"}
    found = schedule_step(**of, cost=CostModel(tables_of(plan, cost)))
    assert found == schedule_step(**of, cost=cost)


def test_without_a_horizon_a_first_plan_is_for_random_batches_of_all_samples(ordered):
    config, shapes = ordered
    assert planned_steps(config, None) == (0, 0)
    assert scenario_batches(config, shapes, 0, 0) == tuple(sample_batches(shapes, 4, 3, config.train.seed))


def test_a_plan_with_a_horizon_is_for_the_batches_that_come_first(ordered):
    config, shapes = ordered
    near = config.model_copy(update={"plan": config.plan.model_copy(update={"horizon_steps": 6})})
    assert planned_steps(near, None) == (0, 6)
    drawn, batches = GlobalBatches(near, shapes), scenario_batches(near, shapes, 0, 6)
    assert batches == tuple(tuple(drawn.at(step)) for step in (1, 3, 5))
    assert {s.num_llm_tokens for batch in batches for s in batch} == {10}
    assert scenario_batches(near, shapes, 14, 2) == (tuple(drawn.at(14)), tuple(drawn.at(15))), "each is taken once"


def test_planning_again_is_for_what_is_left_of_the_stage_or_for_the_horizon(ordered):
    config, shapes = ordered
    assert planned_steps(config, 10) == (10, 6)
    assert {s.num_llm_tokens for batch in scenario_batches(config, shapes, 10, 6) for s in batch} == {1000}
    near = config.model_copy(update={"plan": config.plan.model_copy(update={"horizon_steps": 4})})
    assert [planned_steps(near, step) for step in (10, 14)] == [(10, 4), (14, 2)]
    stages = (StageConfig(name="first", num_steps=12), StageConfig(name="second"))
    assert planned_steps(config.model_copy(update={"stages": stages}), 10) == (10, 2)


def test_a_plan_is_made_with_what_earlier_runs_learnt_and_says_so(planned, tmp_path):
    run = fresh(planned, tmp_path)
    set_config(run, "plan.microbatch_choices=[4]")
    config = run.config()
    lines = list[str]()
    plain = plan_run(run, config, "model", lines.append)[0]
    shown = plan_page(run, [plain])  # brings its rows in
    sql = (
        "select num_microbatches, status, gap_frac, num_columns_left <= num_columns from plan_program where plan_id = ?"
    )
    _, proofs = query(config.store, sql, [plain.plan_id])
    assert proofs == [(4, "optimal", pytest.approx(0.0, abs=1e-8), True)]
    (line,) = (each for each in lines if each.startswith("proven for the planning formula, not for simulated steps"))
    assert line in shown
    basis = basis_of(run)
    assert basis == PlanBasis(plain.plan_id, 0, 0, (), (), basis.terms)
    assert {term.name.partition(" ")[0] for term in basis.terms} >= {m.module for m in plain.modules}
    sizes = sorted(s.num_llm_tokens for s in run.shapes())
    middle = sizes[len(sizes) // 2]
    rows = make_corrections(
        "llm", (1.5, 3.0), (middle,), run_id="earlier", table_id="llm-tp1", observed_at_s=time.time()
    )
    fill(config.store, *rows, run_id="earlier")
    corrected = plan_run(run, config, "model", lambda line: None)[0]
    assert corrected.predicted_step_s > 1.4 * plain.predicted_step_s
    assert "Costs include corrections from earlier steps: `llm` " in corrected.reason
    (factors,) = basis_of(run).factors
    assert (factors.module, factors.edges) == ("llm", (middle,))
    assert factors.factors == pytest.approx((1.5, 3.0), rel=1e-3)
    # The level is that of the batches that it is planned with, not of whatever the earlier run had.
    assert 1.5 < factors.level < 3.0
    (run.path / "plan_basis.json").write_text("{torn")
    assert basis_of(run).factors == ()
    disabled = config.model_copy(update={"correct": config.correct.model_copy(update={"enabled": False})})
    assert plan_run(run, disabled, "model", lambda line: None)[0].predicted_step_s == plain.predicted_step_s


def test_messages_that_no_profile_timed_cost_what_the_data_sheet_of_the_gpus_says(planned, tmp_path):
    run = fresh(planned, tmp_path)
    task = run_task(run, run.config(), "model", print)
    assert {link.source for link in task.problem.cost.links} <= {"measured"}, "a CPU has no data sheet"
    tables = [dataclasses.replace(t, hardware="cuda: NVIDIA H100 80GB HBM3") for t in task.costs.tables]
    costs = dataclasses.replace(task.costs, tables=tables, links=[])
    given = run.run_id, run.config(), task.problem.specs, costs, run.shapes(), run.shapes()[:1]
    links = planning_task(*given).problem.cost.links
    assert {(link.source, link.num_nodes) for link in links} == {("analytic", 1), ("analytic", 2)}


def test_copies_to_the_host_are_as_fast_as_set_profiled_or_by_the_data_sheet(planned, tmp_path):
    run = fresh(planned, tmp_path)
    task = run_task(run, run.config(), "model", print)
    assert task.problem.space.host_bytes_per_s == 0.0
    set_config(run, "plan.offload_gib_per_process=2")
    with pytest.raises(ConfigError, match=r"offload_gib_per_process is 2, but .* `.*` has no data sheet"):
        run_task(run, run.config(), "model", print)

    def rate(*links):
        tables = [dataclasses.replace(t, hardware="cuda: NVIDIA H100 80GB HBM3") for t in task.costs.tables]
        costs = dataclasses.replace(task.costs, tables=tables, links=list(links))
        given = run.run_id, run.config(), task.problem.specs, costs, run.shapes(), run.shapes()[:1]
        return planning_task(*given).problem.space.host_bytes_per_s

    assert rate() == pytest.approx(HOST_FRAC * H100.host_bytes_per_s)
    assert rate(make_link(HOST_COPY, 2, 1, 1e-5, 3e10)) == pytest.approx(3e10)
    set_config(run, "plan.offload_gib_per_process=2", "plan.offload_gb_per_s=7")
    assert rate(make_link(HOST_COPY, 2, 1, 1e-5, 3e10)) == pytest.approx(7e9)


def test_a_plan_of_adapters_has_the_memory_of_what_trains_and_nothing_that_the_engine_refuses(planned, tmp_path):
    run = fresh(planned, tmp_path)
    set_config(run, "plan.microbatch_choices=[4]", "model.dtype=bfloat16")
    plain = run_task(run, run.config(), "model", print).problem
    set_config(run, "train.lora={targets: {llm: [q_proj, v_proj]}, rank: 4}")
    problem = run_task(run, run.config(), "model", print).problem
    assert problem.space.eps == (1,)
    table, spec = problem.cost.table(LLM), problem.spec(LLM)
    assert table.trains_adapters
    width, key_width = spec.kinds[0].query_width, spec.kinds[0].key_width
    sizes = [(4 * width, 4 * spec.hidden_size), (4 * key_width, 4 * spec.hidden_size)]
    assert list(spec.kinds[0].adapters) == sizes
    layers, load = np.array([[spec.num_layers]]), np.array([[1.0], [1.0], [1.0]])
    now, before, rows = (
        stage_bytes(p.spec(LLM), p.cost, layers, load, dp=[n], recompute=False, shard_optimizer=[False], shards=n)
        for p, n in ((problem, 1), (plain, 1), (problem, 2))
    )
    num_trained = spec.num_layers * sum(map(sum, sizes))
    assert now.gradients.item() == 4 * num_trained
    assert now.weights.item() == before.weights.item() + bytes_per_value(table.dtype) * num_trained
    assert now.optimizer.item() < before.optimizer.item() / 10
    ends = stage_params(spec, layers, 1).ends(table).item()
    gathered = bytes_per_value(table.dtype) * ends + before.weights.item() / 2 + 4 * num_trained / 2
    assert (rows.weights.item(), rows.gradients.item()) == (gathered, 4 * num_trained / 2)


def test_plans_for_muon_keep_matrices_whole(planned, tmp_path):
    run = fresh(planned, tmp_path)
    set_config(run, "train.optimizer=muon")
    problem = run_task(run, run.config(), "model", print).problem
    assert problem.space.shard_parameters == (False,)
    assert {spec.tp_choices for spec in problem.specs} == {(1,)}


def test_a_plan_for_the_next_steps_has_room_for_what_comes_later(planned, tmp_path):
    """The first half of the file is text: planned for alone, nothing would bound what images may take."""
    run = fresh(planned, tmp_path)
    set_config(
        run, "plan.microbatch_choices=[2]", "plan.share_ranks=[false]", "plan.horizon_steps=2", "train.num_steps=6",
        "dataset.shuffle_window=4",
    )  # fmt: skip
    config = run.config()
    plain = [dataclasses.replace(s, num_llm_tokens=s.num_text_tokens, items=()) for s in run.shapes()]
    mixed = [s for s in run.shapes() if s.items]
    run.write_shapes([*plain[:16], *mixed])
    batches = scenario_batches(config, run.shapes(), *planned_steps(config, None))
    assert not any(s.items for batch in batches for s in batch)
    plan = plan_run(run, config, "model", lambda line: None)[0]
    assert plan.module("vision").max_tokens > 0
    largest = max(sum(i.num_tokens for i in s.items) for s in mixed)
    assert plan.module("vision").max_tokens >= largest


def test_a_run_plans_for_the_largest_sample_of_its_data_and_names_one_that_nothing_holds(planned, tmp_path):
    run = fresh(planned, tmp_path)
    set_config(run, "plan.microbatch_choices=[2]", "plan.top=4")
    config = run.config()
    huge = dataclasses.replace(make_sample(5000, 10**7), profile_key=run.profile_key(), sample_id="a whole book")
    assert "Not every sample fits" not in plan_run(run, config, "model", lambda line: None)[0].reason
    fill(config.store, huge, run_id="later")
    lines = list[str]()
    plan = plan_run(run, config, "model", lines.append)[0]
    assert "Not every sample fits: sample `a whole book` with 10M tokens in `llm`, where a microbatch" in plan.reason
    assert run.plan().reason == plan.reason
    assert any(line.startswith("no plan fits the largest samples of the data") for line in lines)
