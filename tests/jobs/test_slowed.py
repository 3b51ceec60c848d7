"""What the hooks that make ranks slow multiply seconds by."""

from __future__ import annotations

import dataclasses

import pytest

from dflop.cost.model import CostModel
from dflop.parallel.topology import seat_of
from dflop.records import LLM, ModuleWork
from tests.builders import make_table
from tests.jobs.slowed import Slowed, SlowRank, SlowShapes, StoppedRank, parse
from tests.train.synthetic import make_inline_plan, make_plan, make_shapes, make_step_plan

MANY = 1 << 40
COST = CostModel([make_table("vision"), make_table(LLM)], extrapolate=True)
SHAPES = make_shapes(16, 3, kinds=("image",))


def test_words_of_the_command_line():
    assert parse("shapes:vision:64:128:2.5") == SlowShapes("vision", 64, 128, 2.5)
    assert parse("rank:1:1.5:10") == SlowRank(1, 1.5, 10)
    assert parse("stopped:0:0.4:3") == StoppedRank(0, 0.4, 3)


def test_items_count_for_their_share_of_the_seconds():
    plan = make_plan({"vision": (1, 1), LLM: (1, 1)}, num_microbatches=2)
    same = dataclasses.replace(SHAPES[1], items=())
    batch = [dataclasses.replace(same, num_llm_tokens=n, sample_index=i) for i, n in enumerate((30, 30, 60, 500))]
    work = ModuleWork(LLM, (0, 1, 2, 3), (0,) * 4, (30, 30, 60, 500), (((0, 1, 2),), ((3,),)))
    step_plan = dataclasses.replace(make_step_plan(plan, batch, 0), work=(work,))
    slowed = Slowed([SlowShapes(LLM, 60, 500, 3.0)], plan, seat_of(plan, 1), COST)
    first, second = slowed.multiples(step_plan, batch)
    seconds = [float(COST.item_seconds(LLM, 1, n, n * n, num_layers=4, edge=True)) for n in (30, 60)]
    assert first == pytest.approx((2 * seconds[0] + 3 * seconds[1]) / (2 * seconds[0] + seconds[1]))
    assert second == 1.0


def test_inline_stages_are_slow_by_what_one_module_takes_of_them():
    plan = make_inline_plan([{"vision": 2, LLM: 4}], dp=2, num_microbatches=2)
    step_plan = make_step_plan(plan, SHAPES, 1)
    both, vision, neither = (
        Slowed([SlowShapes(m, 0, MANY, 2.0) for m in modules], plan, seat_of(plan, 0), COST).multiples(
            step_plan, SHAPES
        )
        for modules in (("vision", LLM), ("vision",), ("audio",))
    )
    assert both == pytest.approx([2.0, 2.0])
    assert neither == [1.0, 1.0]
    assert any(1.0 < multiple < 2.0 for multiple in vision)


def test_a_slow_rank_is_slow_from_its_step_on():
    plan = make_inline_plan([{"vision": 2, LLM: 4}], dp=2, num_microbatches=2)
    for rank, step, wanted in ((0, 9, 1.0), (1, 4, 1.0), (1, 5, 1.5), (1, 6, 1.5)):
        slowed = Slowed([SlowRank(1, 1.5, 5)], plan, seat_of(plan, rank), COST)
        assert slowed.multiples(make_step_plan(plan, SHAPES, step), SHAPES) == [wanted, wanted]
