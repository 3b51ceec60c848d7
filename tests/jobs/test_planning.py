"""What the planner may choose for a family is what the engine can build: every seat of every plan, of tiny models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from dflop.cost.analytic import analytic_cost_tables
from dflop.cost.devices import A100
from dflop.cost.model import CostModel
from dflop.errors import ConfigError
from dflop.jobs.planning import search_space
from dflop.models.build import LlmStage
from dflop.parallel.tensor import shard_layers
from dflop.parallel.topology import Seat, SeatPart, seats
from dflop.plan.baselines.uniform import uniform_plans
from dflop.plan.candidates import module_candidates
from dflop.plan.check import check_plan
from dflop.plan.drafts import split_draft
from dflop.plan.inline import inline_choices
from dflop.plan.space import Problem, SearchSpace
from dflop.records import ModuleSpec, Plan, SampleShape
from dflop.train.stages import make_stages
from tests.builders import make_cluster
from tests.jobs.configs import make_config
from tests.models.tiny_families import CASES, Case

NUM_PROCESSES, NUM_MICROBATCHES, BATCH_SIZE = 8, 2, 16


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
    """Every inline and uniform plan, and split ones in which each layout of each module occurs."""
    yield from (plan for _, plan in inline_choices(problem, NUM_MICROBATCHES, top=None))
    yield from uniform_plans(problem)
    found = {s.module: module_candidates(problem, s, NUM_MICROBATCHES) for s in problem.specs}
    first = {name: candidates[0] for name, candidates in found.items()}
    for name, candidates in found.items():
        for i in range(len(candidates)):
            yield split_draft(problem, NUM_MICROBATCHES, {**first, name: candidates[i]}, 0.0)


def stand_in(degree: int) -> SimpleNamespace:
    """A group that can be asked but not used."""
    return SimpleNamespace(size=lambda: degree, rank=lambda: degree - 1)


@pytest.mark.parametrize("name", CASES)
def test_every_plan_that_the_planner_may_make_can_be_built(name):
    case, problem = CASES[name], problem_of(CASES[name])
    plans = list(every_plan(problem))
    assert {plan.layout for plan in plans} == {"split", "inline"}
    built = set()
    for plan in plans:
        check_plan(plan, problem.specs)
        for seat in seats(plan):
            tp = plan.module(seat.module).parallel.tp
            if (tp, seat.parts) not in built:
                built.add((tp, seat.parts))
                stages, _ = make_stages(case.build(), case.family, seat, stand_in(tp))
                assert len(stages) == len(seat.parts)
    assert max(tp for tp, _ in built) == max(tp for s in problem.specs for tp in s.tp_choices)
    for spec in problem.specs:
        depths = {plan.module(spec.module).parallel.pp for plan in plans if not plan.is_inline}
        assert max(depths) == min(spec.max_pp, NUM_PROCESSES - 1)


@pytest.mark.parametrize("name", CASES)
def test_a_module_is_shared_by_no_other_number_of_ranks(name):
    case = CASES[name]
    for spec in case.family.specs():
        for tp in (2, 4, 8):
            ((stage,), _) = make_stages(case.build(), case.family, whole(spec), None)
            is_llm = isinstance(stage, LlmStage)
            layers = stage.decoder.layers if is_llm else stage.layers
            split = case.family.decoder.split if is_llm else case.family.towers[spec.module].split
            if tp in spec.tp_choices:
                assert shard_layers(layers, split, stand_in(tp))
            else:
                with pytest.raises(ConfigError, match="tensor-parallel"):
                    shard_layers(layers, split, stand_in(tp))


def whole(spec: ModuleSpec) -> Seat:
    return Seat(0, spec.module, 0, 0, 0, (SeatPart(spec.module, (0, spec.num_layers), True, True),))


def test_features_behind_the_first_layers_keep_those_together():
    llm = CASES["Qwen3-VL"].family.specs()[-1]
    assert (llm.num_entry_layers, llm.num_layers, llm.max_pp) == (2, 4, 2)


def test_a_run_may_use_what_its_configuration_allows(tmp_path):
    assert search_space(make_config(tmp_path)) == SearchSpace()
    narrow = make_config(
        tmp_path, "plan.layouts=[inline]", "plan.recompute=[true]", "plan.shard_optimizer=false",
        "plan.microbatch_choices=[2, 4]",
    )  # fmt: skip
    assert search_space(narrow) == SearchSpace(("inline",), None, (True,), False, (2, 4))
