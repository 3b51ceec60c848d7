"""Explanations agree with the plan they explain, name the stage that is full, and plan anew where they say so."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from dflop import units
from dflop.emit import RULES
from dflop.plan.drafts import draft
from dflop.plan.grid_choice import GridChoice
from dflop.plan.rank import thorough
from dflop.plan.search import plan_problem
from dflop.plan.space import USABLE_MEMORY_FRAC, Problem
from dflop.records import LLM, ParallelSpec, Plan
from dflop.report.explain_page import Explanation, TimeUse, explanation_json, explanation_tables, paragraph
from dflop.schedule.policies import StepJob
from dflop.simulate.step import step_nodes
from dflop.views.explain_plan import explain_plan
from tests.builders import make_sample
from tests.plan.problems import make_problem

LAYOUTS = ("split", "inline")


def silent(line: str) -> None:
    pass


@pytest.fixture(scope="module", params=LAYOUTS)
def case(request) -> tuple[Problem, Explanation]:
    problem = make_problem(
        "vision", num_processes=4, share_ranks=(request.param == "inline",), optimizer_s_per_param=1e-9
    )
    return problem, explain_plan(problem, plan_problem(problem), silent, sensitivity=False)


def of_layers(
    problem: Problem, layers: Mapping[str, tuple[int, ...]], *, inline: bool, num_microbatches: int = 4
) -> Plan:
    """One replica of everything."""
    if inline:
        grids = [GridChoice.of(ParallelSpec(1, len(layers[LLM]), 1), layers)]
    else:
        grids = [GridChoice.of(ParallelSpec(1, len(own), 1), {name: own}) for name, own in layers.items()]
    return draft(problem, num_microbatches, grids, 0.0)


def test_stages_tell_the_memory_layers_and_processes_of_the_plan(case) -> None:
    problem, found = case
    plan = found.plans[0]
    assert [s.memory_bytes for s in found.stages] == [b for p in plan.pipes for b in p.stage_memory_bytes]
    assert sum(s.num_gpus for s in found.stages) == plan.num_processes
    assert {s.usable_bytes for s in found.stages} == {problem.usable_bytes}
    told = {m.module: 0 for m in plan.modules}
    for stage in found.stages:
        for module, layers in (part.split() for part in stage.layers.split(" + ")):
            told[module] += int(layers)
    assert told == {s.module: s.num_layers for s in problem.specs}


def test_busy_time_is_the_work_of_the_stage_and_the_rest_of_the_predicted_pipeline_is_idle(case) -> None:
    problem, found = case
    plan, nodes = found.plans[0], step_nodes(found.plans[0])
    for stage in found.stages:
        assert stage.busy_s + stage.idle_s + plan.sync_s == pytest.approx(plan.predicted_step_s)
        assert stage.busy_s > 0
        assert stage.idle_s >= 0
    work_s = np.zeros(len(nodes))
    for batch in problem.batches:
        job = StepJob(plan, batch, problem.cost)
        work = job.judge.work(job.assign("balanced", thorough(problem)))
        work_s += ((work.forward_s + work.backward_s) * work.is_active).sum(axis=1) / len(problem.batches)
    keys = list(dict.fromkeys((module, stage) for module, stage, _ in nodes))
    expected = [np.mean([w for w, node in zip(work_s, nodes, strict=True) if node[:2] == key]) for key in keys]
    assert [s.busy_s for s in found.stages] == pytest.approx(expected)
    busiest = max(found.stages, key=lambda s: s.busy_s)
    share = busiest.busy_s / plan.predicted_step_s
    assert f"The busiest stage, {busiest.stage}, computes {units.percent(share)} of the step." in paragraph(found)


def test_shares_of_the_time_add_up_and_with_samples_all_alike_the_pipeline_itself_is_all_that_idles() -> None:
    def time_of(problem: Problem, plan: Plan) -> TimeUse:
        return explain_plan(problem, [plan], silent, sensitivity=False).time

    problem = make_problem("vision", num_processes=5, optimizer_s_per_param=1e-9)
    time = time_of(problem, of_layers(problem, {"vision": (4,), LLM: (2, 2)}, inline=False))
    assert time.busy_frac + time.idle_frac + time.sync_frac + time.unused_frac == pytest.approx(1.0)
    assert time.unused_frac == pytest.approx(2 / 5), "two processes have no seat"
    assert min(time.busy_frac, time.idle_frac, time.sync_frac) > 0
    # In arrival order, as under the rules of another trainer: packing would make even these unlike.
    alike = [tuple(make_sample(i, 100, [("vision", 200)]) for i in range(24))]
    problem = make_problem("vision", num_processes=3, batches=alike, rules=RULES["megatron-mimo"])
    time = time_of(problem, of_layers(problem, {"vision": (4,), LLM: (2, 2)}, inline=False))
    assert time.idle_frac > 0.05
    assert time.even_idle_frac == pytest.approx(time.idle_frac)
    # Replicas without a pipeline would not idle at all.
    problem = make_problem("vision", num_processes=2, rules=RULES["megatron-mimo"])
    grid = GridChoice.of(ParallelSpec(1, 1, 2), {"vision": (4,), LLM: (4,)})
    time = time_of(problem, draft(problem, 4, [grid], 0.0))
    assert time.idle_frac > 0.02
    assert time.even_idle_frac == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("layers", "inline", "name", "stage"),
    [
        ({"vision": (4,), LLM: (1, 3)}, False, "llm", 1),
        ({"vision": (4,), LLM: (3, 1)}, False, "llm", 0),
        ({"vision": (4, 0), LLM: (1, 3)}, True, "the pipeline", 0),
    ],
)
def test_the_fullest_stage_is_named_where_memory_binds(layers, inline, name, stage) -> None:
    roomy = make_problem("vision", num_processes=4)
    plan = of_layers(roomy, layers, inline=inline)
    peaks = plan.module(LLM).stage_memory_bytes
    assert peaks.index(max(peaks)) == stage, "the case is not what it says"
    for share, binds in ((0.95, True), (0.6, False)):
        memory = int(max(peaks) / share / USABLE_MEMORY_FRAC)
        problem = replace(roomy, cluster=replace(roomy.cluster, memory_per_process_bytes=memory))
        found = explain_plan(problem, [of_layers(problem, layers, inline=inline)], silent, sensitivity=False)
        assert tuple(s.memory_bytes for s in found.stages)[-len(peaks) :] == peaks
        limit = next(x for x in found.limits if x.name == f"memory of {name}")
        assert limit.is_binding is binds
        assert limit.used_frac == pytest.approx(share, rel=1e-6)
        assert limit.text.startswith(f"stage {stage} needs ")
        assert (f"memory of {name}" in paragraph(found)) is binds


def test_other_circumstances_are_planned_anew() -> None:
    problem = make_problem("vision", num_processes=2, share_ranks=(False,), microbatches=(2, 4))
    plans = plan_problem(problem)
    found = explain_plan(problem, plans, silent)
    names = [v.name for v in found.variations]
    assert names == [
        "current", "half the node", "one node more", "half the batch", "double the batch", "double the memory",
    ]  # fmt: skip
    by_name = {v.name: v for v in found.variations}
    half = by_name.pop("half the node")
    assert by_name["current"].plan == plans[0]
    assert [v.num_gpus for v in by_name.values()] == [2, 4, 2, 2, 2]
    assert [v.plan.global_batch_size for v in by_name.values()] == [24, 24, 12, 48, 24]
    doubled = by_name["double the batch"]
    assert doubled.samples_per_gpu_s == pytest.approx(48 / doubled.plan.predicted_step_s / 2)
    larger = replace(problem, cluster=replace(problem.cluster, num_nodes=2))
    assert by_name["one node more"].plan == plan_problem(larger)[0]
    assert half.plan is None, "split layouts want a process per module"
    assert math.isnan(half.samples_per_gpu_s)
    assert any(half.note in row for table in explanation_tables(found) for row in table.rows)
    alone = explain_plan(problem, plans, silent, sensitivity=False)
    assert alone == replace(found, variations=found.variations[:1])
    told = json.loads(explanation_json(found, "made up"))
    assert (told["simulated"], told["source"]) == (True, "made up")
    assert [p["predicted_step_s"] for p in told["plans"]] == [p.predicted_step_s for p in plans]
    assert told["variations"][0]["relative"] == 1.0
    assert told["costs"].keys() == {f"{m.module} tp{m.parallel.tp}" for m in plans[0].modules}
