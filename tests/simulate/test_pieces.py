from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflop.records import LLM, MediaItem, ModulePlan, ModuleWork, ParallelSpec, StepPlan
from dflop.schedule.assignment import split_items
from dflop.simulate.pieces import (
    NUM_CHUNKS,
    FramePart,
    Piece,
    TileRange,
    cut,
    deal,
    deal_tiles,
    dealt,
    frame_parts,
    media_cost,
    owned,
    pieces,
)
from tests.train.synthetic import make_plan

LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=12)
GROWTH = st.floats(0, 0.1)


def token_costs(lengths, growth):
    return np.concatenate([1 + growth * np.arange(n) for n in lengths])


@given(LENGTHS, st.integers(1, 8), GROWTH)
def test_pieces_cost_the_same_but_for_a_token(lengths, num_pieces, growth):
    costs = token_costs(lengths, growth)
    ends = cut(lengths, num_pieces, growth)
    assert len(ends) == num_pieces
    assert list(ends) == sorted(ends)
    assert ends[-1] == len(costs)
    shares = [part.sum() for part in np.split(costs, ends[:-1])]
    # What a cut leaves over for lack of half tokens is shared by the pieces behind it.
    assert max(shares) - min(shares) <= 3 * costs.max() + 1e-6 * costs.sum()


@given(LENGTHS, st.integers(1, 8), GROWTH, st.floats(1, 3))
def test_no_piece_goes_beyond_its_share_of_the_cap(lengths, num_pieces, growth, room):
    cap = int(room * sum(lengths))
    sizes = np.diff((0, *cut(lengths, num_pieces, growth, cap)))
    assert sizes.max() <= -(-cap // num_pieces)
    assert sizes.sum() == sum(lengths)


def test_a_line_beyond_its_cap_is_cut_evenly():
    assert cut([100], 4, 0.5, 40) == (25, 50, 75, 100)


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 5))
def test_dealing_is_what_the_scheduler_expects(rows, num_ranks):
    slot = np.zeros(len(rows), dtype=np.int64)
    expected = split_items(slot, np.array(rows, dtype=float), 1, num_ranks)
    assert deal(rows, num_ranks) == expected.tolist()


def video(num_frames):
    return MediaItem("video", "v", "vision", 1, 1, num_frames, 1.0, (num_frames, 2, 2), 4 * num_frames, 16, num_frames)


@given(LENGTHS, st.integers(1, 4), GROWTH, st.randoms())
def test_every_token_and_item_has_one_rank(lengths, cp, growth, rng):
    base = make_plan({"vision": (1, 1), LLM: (1, 1)}, num_microbatches=1)
    modules = [ModulePlan(m, ParallelSpec(1, 1, 1, cp), 0, (4,), (0,), cost_growth=growth) for m in ("vision", LLM)]
    plan, ids = replace(base, modules=tuple(modules)), tuple(range(len(lengths)))
    order = tuple(rng.sample(ids, len(ids)))
    work = tuple(ModuleWork(m, ids, (0,) * len(ids), tuple(lengths), ((order,),)) for m in ("vision", LLM))
    step_plan = StepPlan("run", 0, "balanced", ids, 1, work, 1, 1.0, 1.0)
    found = pieces(plan, step_plan, 0, 0)
    assert len(found) == cp
    line = [piece for of in found for piece in of]
    tokens = [(p.sample, t) for p in line for t in range(p.first, p.end)]
    assert tokens == [(sample, t) for sample in order for t in range(lengths[sample])]
    assert all(isinstance(p, Piece) and p.first < p.end for p in line)
    shares = dealt(plan, step_plan, "vision", 0, 0, lambda item: video(lengths[item]))
    tiles = [(r.item, tile) for of in shares for r in of for tile in range(r.first, r.end)]
    assert sorted(tiles) == [(item, tile) for item in ids for tile in range(lengths[item])]
    assert all([order.index(r.item) for r in of] == sorted(order.index(r.item) for r in of) for of in shares)
    assert sorted(item for of in shares for item in owned(of)) == list(ids)
    alone = dealt(plan, step_plan, "vision", 0, 0, lambda item: replace(video(lengths[item]), kind="audio"))
    assert sorted(alone_range for of in alone for alone_range in of) == [(item, 0, 1) for item in ids]


def test_media_are_dealt_out_by_cost_unless_a_rank_then_has_more_tokens_than_memory_holds():
    """One picture of 800 tokens costs what nine of 200 do, whose tokens are more than a rank's half."""
    tokens, parts = [800, *[200] * 9], [1] * 10
    costs = [media_cost(n, n * n, 0.01) for n in tokens]
    by_cost = [[800], [200] * 9]
    for max_tokens in (0, 3600):
        of_ranks = deal_tiles(tokens, parts, 2, costs, max_tokens)
        assert [[tokens[r.item] for r in of] for of in of_ranks] == by_cost
    by_tokens = deal_tiles(tokens, parts, 2)
    assert deal_tiles(tokens, parts, 2, costs, 3599) == by_tokens
    assert [sum(tokens[r.item] for r in of) for of in by_tokens] == [1400, 1200]


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 400)), min_size=1, max_size=12),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.001, 0.05]),
)
def test_ranks_that_cut_frames_have_equal_shares_but_for_half_a_frame_or_a_small_item(shapes, num_ranks, growth):
    frames, tokens = [f for f, _ in shapes], [4 * f * n for f, n in shapes]
    costs = [media_cost(t, t * t // f, growth) for t, f in zip(tokens, frames, strict=True)]
    of_ranks = deal_tiles(tokens, frames, num_ranks, costs, 0, 4)
    runs = sorted((r.item, run) for of in of_ranks for r in of for run in range(r.first, r.end))
    assert runs == [(item, run) for item, n in enumerate(tokens) for run in range(n // 4)]
    assert all([r.item for r in of] == sorted(r.item for r in of) for of in of_ranks)
    of_run = [4 * c / t for c, t in zip(costs, tokens, strict=True)]
    shares = [sum(of_run[r.item] * (r.end - r.first) for r in of) for of in of_ranks]
    even = sum(costs) / num_ranks
    assert max(shares) <= even * (1 + 1 / NUM_CHUNKS) + max(of_run)


def test_a_frame_is_cut_only_where_whole_ones_leave_a_rank_with_more_than_its_share():
    assert deal_tiles([400] * 8, [1] * 8, 4, (), 0, 4) == deal_runs([[0, 4], [1, 5], [2, 6], [3, 7]])
    picture = deal_tiles([4000], [1], 4, (), 0, 4)
    assert picture == [[TileRange(0, 250 * rank, 250 * rank + 250)] for rank in range(4)]
    video = deal_tiles([4000], [40], 3, (), 0, 4)
    assert all(r.first % 25 == 0 == r.end % 25 for of in video for r in of)


def deal_runs(items: list[list[int]]) -> list[list[TileRange]]:
    """Whole items of 100 runs."""
    return [[TileRange(item, 0, 100) for item in of] for of in items]


def test_parts_of_frames_are_counted_in_tokens_of_their_frame():
    found = frame_parts([TileRange(7, 3, 12)], 4, lambda item: 16)
    assert found == [FramePart(7, 0, 12, 16), FramePart(7, 1, 0, 16), FramePart(7, 2, 0, 16)]


def test_under_a_cap_on_tokens_every_rank_has_a_part_of_each_large_item():
    """By cost one rank has all small pictures, which are more tokens than its share of what memory holds."""
    tokens, parts = [4000, *[200] * 9], [1] * 10
    costs = [media_cost(n, n * n, 0.01) for n in tokens]
    by_cost = deal_tiles(tokens, parts, 2, costs, 0, 4)
    most = max(sum(4 * (r.end - r.first) for r in of) for of in by_cost)
    assert deal_tiles(tokens, parts, 2, costs, 2 * most, 4) == by_cost
    capped = deal_tiles(tokens, parts, 2, costs, 2 * most - 1, 4)
    assert [of[0] for of in capped] == [TileRange(0, 0, 500), TileRange(0, 500, 1000)]
    assert [sum(4 * (r.end - r.first) for r in of) for of in capped] == [3000, 2800]
