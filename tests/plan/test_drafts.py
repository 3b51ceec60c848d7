import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pytest

from dflop.cost.link_costs import ALL_REDUCE
from dflop.cost.model import CostModel
from dflop.models.loss_size import loss_peak_bytes
from dflop.plan import sync
from dflop.plan.drafts import charged, cost_growth, draft, fits
from dflop.plan.grid_bytes import chain_peaks, largest_loads
from dflop.plan.grid_choice import GridChoice
from dflop.plan.space import Problem
from dflop.records import LLM, CostTerms, ParallelSpec, Plan
from dflop.simulate.pieces import cut
from tests.builders import make_link, make_sample
from tests.plan.problems import make_problem

M = 1_000_000
PIPELINES = ParallelSpec(1, 2, 2)
VISION = GridChoice.of(ParallelSpec(1, 1, 2), {"vision": (4,)}, shard_optimizer=True)
TEXT = GridChoice.of(ParallelSpec(1, 2, 1), {LLM: (2, 2)}, recompute=True)


def split(problem: Problem, *grids: GridChoice) -> Plan:
    return draft(problem, 2, grids or (VISION, TEXT), 1.5)


def inline(
    problem: Problem, *, parallel: ParallelSpec = PIPELINES,
    layers: Mapping[str, tuple[int, ...]] = MappingProxyType({"vision": (4, 0), LLM: (1, 3)}),
    shard_optimizer: bool = True, with_caps: bool = True,
) -> Plan:  # fmt: skip
    grid = GridChoice.of(parallel, layers, shard_optimizer=shard_optimizer)
    return draft(problem, 2, [grid], 2.5, with_caps=with_caps)


def even_problem(**changes: object) -> Problem:
    """24 samples of 125 LLM tokens with one item of 100 each: nothing is uneven."""
    batch = [make_sample(i, 100, [("vision", 100)]) for i in range(24)]
    return make_problem("vision", batches=[batch], **changes)  # type: ignore[arg-type]  # keywords of a test


def test_memory_of_a_split_draft_by_hand():
    plan = split(even_problem())
    # Four buckets for vision, two for the LLM; a bucket may have 1.25 times the average.
    vision_tokens, llm_tokens = 1.25 * 24 * 100 / 4, 1.25 * 24 * 125 / 2
    in_flight = 2  # two microbatches in all, three stages to the loss
    vision = (6 + 12 / 2) * 6 * M + in_flight * 5 * vision_tokens * 10_000 + 6 * M  # a matrix of the edge in the making
    assert plan.module("vision").stage_memory_bytes == (vision,)
    assert all(isinstance(peak, int) for m in plan.modules for peak in m.stage_memory_bytes)
    crossing = llm_tokens * 2 * 64  # as much as the gradient that comes into a layer
    once = llm_tokens * (10_000 + 2 * 2 * 256) + 2 * 64 * 256 + crossing
    first = 18 * 3 * M + 2 * (2 * llm_tokens * 1_000 + crossing) + once
    loss = loss_peak_bytes(1.25 * 24 * 10 / 2, 15_625, 64, 2, trains=True)  # more than a layer
    last = 18 * 3 * M + 1 * llm_tokens * (2 * 1_000 + 10_000) + loss
    # While both compute, the next message comes in.
    assert plan.module(LLM).stage_memory_bytes == (first + crossing, last + crossing)


def test_memory_of_an_inline_draft_by_hand():
    plan = inline(even_problem())
    vision_tokens, llm_tokens = 1.25 * 24 * 100 / 4, math.ceil(1.25 * 24 * 125 / 4)
    per_param = 6 + 12 / 2
    crossing, mlp = llm_tokens * 2 * 64, llm_tokens * (2 * 2 * 256 + 2 * 64) + 2 * 64 * 256
    first = per_param * (6 + 2) * M + 2 * ((5 * vision_tokens + llm_tokens) * 10_000 + crossing) + mlp
    loss = loss_peak_bytes(1.25 * 24 * 10 / 4, 15_625, 64, 2, trains=True)
    last = per_param * 4 * M + 1 * (4 * llm_tokens * 10_000 + crossing) + loss
    assert plan.module(LLM).stage_memory_bytes == (first + crossing, last + crossing)
    assert plan.module("vision").stage_memory_bytes == (0, 0)
    assert [m.first_rank for m in plan.modules] == [0, 0]
    assert (len(plan.grids), plan.num_processes) == (1, 4)


def inline_in_groups(problem: Problem, cp: int = 2) -> Plan:
    layers = {"vision": (4,), LLM: (4,)}
    return inline(problem, parallel=ParallelSpec(1, 1, 1, cp), layers=layers)


@pytest.mark.parametrize("make", [split, inline, inline_in_groups])
def test_token_caps_are_as_high_as_memory_allows(make):
    problem = make_problem("vision", memory_bytes=600 * M)
    plan = make(problem)
    assert fits(problem, plan)
    for chain in plan.grids:
        charged = largest_loads(problem, plan, chain)
        assert all(m.max_tokens >= load[1] for m, load in zip(chain, charged, strict=True))
        factor = min(m.max_tokens / load[1] for m, load in zip(chain, charged, strict=True))
        peaks = [chain_peaks(problem, plan, chain, [x * f for x in charged]).max() for f in (factor, 1.001 * factor)]
        assert peaks[0] <= problem.usable_bytes < peaks[1]


def test_caps_are_looked_for_when_a_draft_is_charged():
    problem = make_problem("vision", memory_bytes=600 * M)
    plan = inline(problem)
    later = inline(problem, with_caps=False)
    assert [m.max_tokens for m in later.modules] == [int(x[1]) for x in largest_loads(problem, plan, plan.modules)]
    assert later != plan == charged(problem, later)


def test_pieces_of_a_long_sample_cost_the_same():
    """A token costs more the later it is, by attention to those before it."""
    problem = make_problem("vision")
    plan = inline_in_groups(problem, cp=4)
    ends = np.array([0, *cut([8_000], 4, plan.module(LLM).cost_growth)])
    squares, tokens = np.diff(ends**2), np.diff(ends)
    forward_s, backward_s = problem.cost.module_seconds(LLM, (1, tokens, squares), num_layers=4, edge=True)
    seconds = forward_s + backward_s
    assert seconds.max() / seconds.min() == pytest.approx(1, abs=0.002)
    assert tokens[0] > 1.2 * tokens[-1]
    assert inline(problem).module(LLM).cost_growth == 0


@pytest.mark.parametrize("per_token_s", [0.0, 1e-30])
def test_where_tokens_cost_nothing_pieces_are_cut_all_the_same(per_token_s):
    """Small loads may take as long as large ones; what ranks cut by must be a number even then."""
    problem = make_problem()
    terms = CostTerms(1e-3, per_token_s, 1e-9, 0.0, 0.0, 0.0)
    table = dataclasses.replace(problem.cost.table(LLM), forward_s=terms, backward_s=terms)
    problem = dataclasses.replace(problem, cost=CostModel([table], specs=problem.specs, extrapolate=True))
    growth = cost_growth(problem, 1, ParallelSpec(1, 1, 1, 4), 0.0)
    assert 0 < growth <= 1
    assert sum(np.diff((0, *cut([800], 4, growth)))) == 800


def test_a_rank_may_have_a_tile_more_than_its_part_of_the_media():
    problem = even_problem()
    assert problem.largest_tiles["vision"].tolist() == [1, 100, 10_000]
    plan = inline_in_groups(problem)
    (vision,), (alone,) = (
        chain_peaks(problem, plan, plan.modules[:1], [load])[0]
        for load in (np.array([30.0, 3000, 300_000]), np.array([1.0, 100, 10_000]))
    )
    rest = (6 + 12 / 2) * 6 * M + 6 * M  # both ranks share its optimizer
    chunk, in_flight = 3000 / (4 * 2) + 100, 2
    assert vision - rest == in_flight * (3000 + chunk) / 2 * 5 * 10_000
    assert alone - rest == in_flight * 100 * 5 * 10_000, "one tile is all on one rank"


def test_ranks_that_cut_frames_have_no_tile_too_much_and_plans_say_what_is_cut():
    problem = even_problem()
    vision, llm = problem.specs
    cutting = dataclasses.replace(problem, specs=(dataclasses.replace(vision, merge_tokens=4), llm))
    load = np.array([[1.0], [100], [10_000]])
    assert (problem.uneven("vision", load, 4) == 4 * load).all()
    assert (cutting.uneven("vision", load, 4) == load * (1 + 3 / 16)).all()
    assert [m.merge_tokens for m in inline_in_groups(cutting).modules] == [4, 0]
    assert inline_in_groups(cutting).plan_id != inline_in_groups(problem).plan_id
    assert [m.merge_tokens for m in inline(cutting).modules] == [0, 0]
    assert inline(cutting).plan_id == inline(problem).plan_id


def test_a_plan_that_does_not_fit_is_capped_at_what_it_is_charged_with():
    problem = make_problem("vision", memory_bytes=60 * M)
    plan = split(problem)
    assert not fits(problem, plan)
    assert [m.max_tokens for m in plan.modules] == [
        int(load[1]) for m in plan.modules for load in largest_loads(problem, plan, [m])
    ]


def test_ids_tell_choices_apart_and_ignore_the_run():
    problem = make_problem("vision")
    plan = split(problem)
    assert split(dataclasses.replace(problem, run_id="other", snapshot_seq=9)).plan_id == plan.plan_id
    others = [
        split(problem, dataclasses.replace(VISION, recomputed=VISION.layers), TEXT),
        draft(problem, 3, (VISION, TEXT), 1.5),
        inline(problem),
        inline(problem, shard_optimizer=False),
        split(dataclasses.replace(problem, cost=problem.cost.with_corrections({LLM: 1.1}))),
    ]
    assert len({plan.plan_id, *(p.plan_id for p in others)}) == 6


def test_tensor_parallel_groups_stay_on_a_node():
    problem = make_problem("vision", num_processes=4, num_nodes=2, tps=(1, 4), max_pp=4)
    text = GridChoice.of(ParallelSpec(4, 1, 1), {LLM: (4,)})
    plan = split(problem, GridChoice.of(ParallelSpec(1, 1, 3), {"vision": (4,)}), text)
    assert {m.module: m.first_rank for m in plan.modules} == {LLM: 0, "vision": 4}
    assert [m.module for m in plan.modules] == ["vision", LLM]
    aligned = GridChoice.of(ParallelSpec(1, 1, 4), {"vision": (4,)})
    assert {m.module: m.first_rank for m in split(problem, aligned, text).modules} == {"vision": 0, LLM: 4}


def test_seconds_behind_the_pipeline_by_hand(monkeypatch):
    links = [make_link(ALL_REDUCE, 2, nodes, 0.01 * nodes, 1e9) for nodes in (1, 2)]
    problem = make_problem(
        "vision", num_processes=2, num_nodes=2, links=links, optimizer_s_per_param=1e-8, dtype="float32"
    )
    vision, llm = 24e6 / 1e9 + 0.01 + 6e6 * 1e-8 / 2, 3e6 * 1e-8
    assert split(problem).sync_s == pytest.approx(max(vision, llm))
    swapped = dataclasses.replace(VISION, layers={LLM: (4,)}, recomputed={LLM: (0,)})
    deep = GridChoice.of(ParallelSpec(1, 2, 1), {"vision": (2, 2)}, recompute=True)
    assert split(problem, deep, swapped).sync_s == pytest.approx(max(vision, llm))
    # Inline: the first stage holds all of vision, and a layer and the embedding of the LLM.
    assert inline(problem).sync_s == pytest.approx(32e6 / 1e9 + 0.01 + 8e6 * 1e-8 / 2)
    layers = {"vision": (4,), LLM: (4,)}
    whole = inline(problem, parallel=ParallelSpec(1, 1, 4), layers=layers, shard_optimizer=False)
    s_per_param = (3 / 4) / (1 / 2) * 4 / 1e9  # four ranks on two nodes, as a ring
    assert whole.sync_s == pytest.approx(0.04 + 12e6 * s_per_param + 12e6 * 1e-8)
    # Buckets of a million parameters: the last pass hides all but the last one, and behind it the encoder's entry.
    monkeypatch.setattr(sync, "BUCKET_BYTES", 4e6)
    whole = inline(problem, parallel=ParallelSpec(1, 1, 4), layers=layers, shard_optimizer=False)
    assert whole.sync_s == pytest.approx(0.04 + 2e6 * s_per_param + 12e6 * 1e-8)
    # Owners' buckets come in rounds of four; then the first third of the weights comes, in no time to hide.
    whole = inline(problem, parallel=ParallelSpec(1, 1, 4), layers=layers)
    sums_s, weights_s = (4e6 + 1e6) * s_per_param / 2, 4e6 * s_per_param / 2
    assert whole.sync_s == pytest.approx(0.04 + sums_s + weights_s + 12e6 * 1e-8 / 4)


@pytest.mark.parametrize(("before_s", "messages_s", "pass_s"), [(0, 3, 10), (0, 30, 10), (8, 3, 10), (40, 3, 10)])
def test_what_a_pass_leaves_of_its_messages_is_a_queue(before_s, messages_s, pass_s):
    for rounds in (1, 2, 7):
        sent_s = before_s
        for k in range(rounds):
            sent_s = max(sent_s, (k + 1) / rounds * pass_s) + messages_s / rounds
        assert sync._left_s(before_s, messages_s, pass_s, rounds) == pytest.approx(sent_s - pass_s)
