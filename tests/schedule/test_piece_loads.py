from dataclasses import replace
from itertools import compress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.records import LLM
from dflop.schedule.items import module_items
from dflop.schedule.piece_loads import piece_loads, tile_loads
from dflop.simulate.pieces import NUM_CHUNKS, cut, deal_tiles, frame_parts, media_cost
from tests.builders import make_sample


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.003, 0.05]),
    st.sampled_from([0, 200, 1500]),
)
def test_loads_are_those_of_the_pieces_but_for_a_token(samples, num_pieces, growth, cap):
    items = module_items([make_sample(i, n, [], n // 3) for i, (_, n) in enumerate(samples)], LLM)
    cell = np.array([c for c, _ in samples])
    found = piece_loads(items, cell, 4, num_pieces, growth, cap)
    assert found.loads.shape == (3, 4, num_pieces)
    for c in range(4):
        lengths = [n for of, n in samples if of == c]
        starts, ends = np.cumsum([0, *lengths]), (0, *cut(lengths, num_pieces, growth, cap))
        most_before = 0
        for piece in range(num_pieces):
            low, high = ends[piece], ends[piece + 1]
            tokens, squares = 0, 0
            for start, n in zip(starts, lengths, strict=False):
                a, b = np.clip([low - start, high - start], 0, n)
                tokens, squares = tokens + b - a, squares + b * b - a * a
                most_before = max(most_before, a if b > a else 0)
            # Whole numbers there, fractions here: a cut may lie a token further per cut before it.
            assert found.loads[1, c, piece] == pytest.approx(tokens, abs=2 * num_pieces)
            assert found.loads[2, c, piece] == pytest.approx(squares, abs=2 * num_pieces * 2 * 300)
        if num_pieces == 1:
            assert found.received[c] == most_before == 0
    for column, of in zip(items.loads, found.loads, strict=True):
        assert of.sum() == pytest.approx(column.sum())


def test_keys_of_a_sample_that_is_cut_are_received():
    items = module_items([make_sample(0, 100, []), make_sample(1, 300, [])], LLM)
    found = piece_loads(items, np.zeros(2, dtype=np.int64), 1, 4, 0.0)
    assert found.loads[1].tolist() == [[100, 100, 100, 100]]
    assert found.received.tolist() == [200]
    assert found.loads[2].tolist() == [[100**2, 100**2, 200**2 - 100**2, 300**2 - 200**2]]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=10),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.25, 8.0]),
    st.sampled_from([0, 100, 500]),
)
def test_tiles_are_dealt_out_as_ranks_deal_them_out(rows, num_ranks, growth, max_tokens):
    samples = [make_sample(i, 1, [("vision", tiles * size)]) for i, (_, tiles, size) in enumerate(rows)]
    samples = [
        replace(s, items=(replace(s.items[0], grid=(tiles, 1, size)),))
        for s, (_, tiles, size) in zip(samples, rows, strict=True)
    ]
    items, cell = module_items(samples, "vision"), np.array([c for c, *_ in rows])
    found = tile_loads(items, cell, 3, num_ranks, growth, max_tokens)
    assert not found.received.any()
    for c in range(3):
        inside = [(tiles * size, tiles) for of, tiles, size in rows if of == c]
        costs = [
            media_cost(s.items[0].num_tokens, s.items[0].sum_sq_tokens, growth) for s in compress(samples, cell == c)
        ]
        shares = deal_tiles([n for n, _ in inside], [parts for _, parts in inside], num_ranks, costs, max_tokens)
        tokens = [sum(inside[r.item][0] * (r.end - r.first) // inside[r.item][1] for r in of) for of in shares]
        assert found.loads[1, c].tolist() == tokens
        dealt = sorted((r.item, part) for of in shares for r in of for part in range(r.first, r.end))
        assert dealt == [(item, part) for item, (_, parts) in enumerate(inside) for part in range(parts)]
        of_costs = [sum(costs[r.item] * (r.end - r.first) // inside[r.item][1] for r in of) for of in shares]
        is_even = [
            max(of_ranks) - min(of_ranks) <= 2 * largest_chunk(weights, [parts for _, parts in inside], num_ranks)
            for of_ranks, weights in ((of_costs, costs), (tokens, [n for n, _ in inside]))
        ]
        assert any(is_even) if max_tokens else is_even[0]


def largest_chunk(weights, parts, num_ranks):
    """Of items in whole tiles: a tile, or what two of about four chunks of a rank weigh."""
    tiles = [weight // n for weight, n in zip(weights, parts, strict=True)]
    return max([2 * -(-sum(weights) // (NUM_CHUNKS * num_ranks)), *tiles])


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.integers(1, 60)), min_size=1, max_size=10),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.01]),
    st.sampled_from([0, 300]),
)
def test_loads_of_cut_frames_are_those_of_the_ranks(rows, num_ranks, growth, max_tokens):
    samples = [make_sample(i, 1, [("vision", 4 * frames * size)]) for i, (_, frames, size) in enumerate(rows)]
    samples = [
        replace(s, items=(replace(s.items[0], grid=(frames, 2, 2 * size), sum_sq_tokens=frames * (4 * size) ** 2),))
        for s, (_, frames, size) in zip(samples, rows, strict=True)
    ]
    items, cell = module_items(samples, "vision"), np.array([c for c, *_ in rows])
    found = tile_loads(items, cell, 3, num_ranks, growth, max_tokens, 4)
    for c in range(3):
        media = [s.items[0] for s in compress(samples, cell == c)]
        tokens, frames = [m.num_tokens for m in media], [m.grid[0] for m in media]
        costs = [media_cost(m.num_tokens, m.sum_sq_tokens, growth) for m in media]
        of_ranks = deal_tiles(tokens, frames, num_ranks, costs, max_tokens, 4)
        of_frames = [frame_parts(of, 4, lambda i, m=media: m[i].num_tokens // m[i].grid[0]) for of in of_ranks]
        runs = sorted((r.item, run) for of in of_ranks for r in of for run in range(r.first, r.end))
        assert runs == [(item, run) for item, n in enumerate(tokens) for run in range(n // 4)]
        # Whole numbers there, fractions here: a cut halfway between two frames may come before either.
        frame = max((n // f for n, f in zip(tokens, frames, strict=True)), default=0)
        assert found.loads[1, c] == pytest.approx([sum(p.end - p.first for p in of) for of in of_frames], abs=frame)
        squares = [sum((p.end - p.first) * tokens[p.item] // frames[p.item] for p in of) for of in of_frames]
        assert found.loads[2, c] == pytest.approx(squares, abs=frame**2)
        others = [sum(tokens[p.item] // frames[p.item] - p.end + p.first for p in of) for of in of_frames]
        assert found.received[c] == pytest.approx(max(others), abs=4)


def test_a_picture_is_cut_evenly_and_every_rank_receives_the_rest_of_it():
    samples = [make_sample(0, 1, [("vision", 65_536)]), make_sample(1, 1, [("vision", 1_024)])]
    found = tile_loads(module_items(samples, "vision"), np.array([0, 1]), 2, 4, 0.001, 0, 4)
    assert found.loads[1].tolist() == [[16_384] * 4, [256] * 4]
    assert found.received.tolist() == [3 * 16_384, 3 * 256]
