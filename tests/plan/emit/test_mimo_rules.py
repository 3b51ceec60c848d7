from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.plan.emit.mimo_rules import MimoRules, end_layers, mimo_problems
from dflop.records import LLM, Plan
from tests.plan.emit.plans import mimo_like_plans, module, split, split_plans

RULES = MimoRules()


@given(st.one_of(split_plans(), mimo_like_plans()), st.integers(1, 64))
def test_a_plan_is_valid_when_its_modules_their_combination_and_its_microbatches_are(plan: Plan, num_gpus: int):
    layouts = {m.module: m for m in plan.modules}
    assert (mimo_problems(plan, num_gpus) == []) == (
        all(RULES.candidate_ok(name, layout) for name, layout in layouts.items())
        and RULES.combination_ok(layouts, num_gpus)
        and RULES.microbatches_ok(layouts, plan.num_microbatches, plan.global_batch_size)
    )


@given(st.one_of(split_plans(), mimo_like_plans()))
def test_what_couples_modules_couples_two(plan: Plan):
    """So that a program over selection variables can say it: two choices that exclude each other."""
    layouts = {m.module: m for m in plan.modules}
    pairs = itertools.combinations(layouts.items(), 2)
    assert RULES.combination_ok(layouts, 10**6) == all(RULES.combination_ok(dict(pair), 10**6) for pair in pairs)


@pytest.mark.parametrize("shift", [-1, 1])
def test_ranks_leave_no_gap_and_do_not_overlap(shift: int):
    plan = split(module("vision", 1, 1, 2), module(LLM, 1, 1, 2))
    moved = dataclasses.replace(plan.module(LLM), first_rank=2 + shift)
    assert mimo_problems(plan, 4) == []
    assert mimo_problems(dataclasses.replace(plan, modules=(plan.modules[0], moved)), 8) == [
        f"`llm` starts at rank {2 + shift}, the ranks before it end at 2"
    ]


def test_the_language_model_may_come_first():
    plan = split(module(LLM, 1, 1, 2), module("vision", 1, 1, 2))
    assert mimo_problems(dataclasses.replace(plan, modules=plan.modules[::-1]), 4) == []


def test_a_plan_without_a_language_model_is_refused():
    plan = split(module("vision", 1, 1, 2))
    assert mimo_problems(plan, 4) == ["no module `llm`"]


def test_no_layouts_ask_for_equal_microbatches_only():
    assert RULES.microbatches_ok({}, 4, 16)
    assert not RULES.microbatches_ok({}, 3, 16)


LAYERS = st.lists(st.integers(1, 9), min_size=1, max_size=9).map(tuple)


@given(LAYERS)
def test_a_split_that_can_be_said_is_recovered_from_how_it_is_said(layers: tuple[int, ...]):
    ends = end_layers(layers)
    if ends is None:
        assert len(set(layers[1:-1])) > 1
        return
    first, last = ends
    between = layers[first is not None : len(layers) - (last is not None)]
    assert len(set(between)) == 1
    assert (first or between[0], last or between[0]) == (layers[0], layers[-1])


def test_an_empty_stage_cannot_be_said():
    assert end_layers((2, 0)) is None


@given(LAYERS)
def test_the_nearest_split_can_be_said_and_is_as_fast(layers: tuple[int, ...]):
    near = RULES.nearest_layers(layers)
    assert end_layers(near) is not None
    assert (len(near), sum(near), near[-1]) == (len(layers), sum(layers), layers[-1])
    assert near == layers or end_layers(layers) is None
    if near != layers:
        mean = sum(layers[:-1]) / (len(layers) - 1)
        # With -(-x // 1) the deepest stage of an even split; it is passed only where the first would be left empty.
        even = -int(-mean // 1)
        assert max(near[:-1]) <= max(layers[:-1]) or even * (len(layers) - 2) >= sum(layers[:-1])
