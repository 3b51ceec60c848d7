import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.emit.mimo_rules import MimoRules, end_layers, mimo_problems
from dflop.plan.columns import Columns
from dflop.plan.drafts import draft
from dflop.plan.grid_search import grids_apart
from dflop.records import LLM
from tests.emit.plans import mimo_like_plans, module, split, split_plans
from tests.plan.problems import make_problem

RULES = MimoRules()


def is_allowed(layouts, num_microbatches, global_batch_size) -> bool:
    """Rule by rule: each module's own, those of pairs, the microbatches'."""
    return not (
        any(RULES.module_problems(name, layout) for name, layout in layouts.items())
        or any(RULES.pair_problems(a, b) for a, b in itertools.combinations(layouts.items(), 2))
        or RULES.batch_problems(layouts, num_microbatches, global_batch_size)
    )


@settings(max_examples=50)
@given(st.one_of(split_plans(), mimo_like_plans()), st.integers(1, 64))
def test_a_plan_is_valid_when_its_modules_their_combination_and_its_microbatches_are(plan, num_gpus):
    layouts = {m.module: m for m in plan.modules}
    has_room = sum(m.parallel.num_processes for m in plan.modules) <= num_gpus
    wanted = has_room and is_allowed(layouts, plan.num_microbatches, plan.global_batch_size)
    assert (mimo_problems(plan, num_gpus) == []) == wanted


@pytest.mark.parametrize("shift", [-1, 1])
def test_ranks_leave_no_gap_and_do_not_overlap(shift):
    plan = split(module("vision", 1, 1, 2), module(LLM, 1, 1, 2))
    moved = dataclasses.replace(plan.module(LLM), first_rank=2 + shift)
    assert mimo_problems(plan, 4) == []
    assert mimo_problems(dataclasses.replace(plan, modules=(plan.modules[0], moved)), 8) == [
        f"`llm` starts at rank {2 + shift}, the ranks before it end at 2"
    ]


def test_a_language_model_there_must_be_and_it_may_come_first():
    plan = split(module(LLM, 1, 1, 2), module("vision", 1, 1, 2))
    assert mimo_problems(dataclasses.replace(plan, modules=plan.modules[::-1]), 4) == []
    assert mimo_problems(split(module("vision", 1, 1, 2)), 4) == ["no module `llm`"]


LAYERS = st.lists(st.integers(1, 9), min_size=1, max_size=9).map(tuple)


@given(LAYERS)
def test_a_split_that_can_be_said_is_recovered_from_how_it_is_said(layers):
    assert end_layers((*layers, 0)) is None, "an empty stage cannot be said"
    ends = end_layers(layers)
    if ends is None:
        assert len(set(layers[1:-1])) > 1
        return
    first, last = ends
    between = layers[first is not None : len(layers) - (last is not None)]
    assert len(set(between)) == 1
    assert (first or between[0], last or between[0]) == (layers[0], layers[-1])


@given(LAYERS)
def test_the_nearest_split_can_be_said_and_is_as_fast(layers):
    near = RULES.nearest_layers(layers)
    assert end_layers(near) is not None
    assert (len(near), sum(near), near[-1]) == (len(layers), sum(layers), layers[-1])
    assert near == layers or end_layers(layers) is None
    if near != layers:
        mean = sum(layers[:-1]) / (len(layers) - 1)
        # With -(-x // 1) the deepest stage of an even split; it is passed only where the first would be left empty.
        even = -int(-mean // 1)
        assert max(near[:-1]) <= max(layers[:-1]) or even * (len(layers) - 2) >= sum(layers[:-1])


@pytest.mark.parametrize(("encoders", "num_microbatches"), [(("vision",), 4), (("vision", "audio"), 2)])
def test_the_parts_hold_every_allowed_choice_and_no_other(encoders, num_microbatches):
    problem = make_problem(*encoders, num_processes=5, tps=(1, 2, 3), share_ranks=(False,), memory_bytes=2**28)
    names = [spec.module for spec in problem.specs]
    columns = Columns.of(names, num_microbatches, 5, grids_apart(problem, num_microbatches, math.inf))
    assert columns is not None
    size = problem.global_batch_size // num_microbatches
    every = itertools.product(*(np.flatnonzero(held).tolist() for held in columns.holds))
    allowed, covers = set(), list(every)
    for cover in covers:
        plan = draft(problem, num_microbatches, columns.choices(cover), 0.0, with_caps=False)
        layouts = {  # as the search may emit them
            m.module: dataclasses.replace(m, layers_per_stage=RULES.nearest_layers(m.layers_per_stage))
            for m in plan.modules
        }
        if not any(m.recomputed for m in plan.modules) and is_allowed(
            layouts, num_microbatches, problem.global_batch_size
        ):
            allowed.add(cover)
    parts = []
    for rows in RULES.parts(columns, size):
        of_modules = (rows[held[rows]].tolist() for held in columns.holds)
        parts.append(set(itertools.product(*of_modules)))
    assert set().union(*parts) == allowed
    assert 0 < len(allowed) < len(covers)
    assert not any(a <= b for a, b in itertools.permutations(parts, 2))
