"""What context-parallel ranks exchange, both ends worked out for themselves, without any process."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflop.plan.memory import layer_bytes
from dflop.records import LLM, RunMode
from dflop.simulate.pieces import Piece, cut
from dflop.train.context import Line
from tests.plan.problems import make_problem


def cut_line(lengths, num_ranks, growth):
    """Pieces of each rank, sample by sample."""
    starts, found = np.cumsum([0, *lengths]).tolist(), []
    for low, high in itertools.pairwise((0, *cut(lengths, num_ranks, growth))):
        parts = [
            (s, max(low - at, 0), min(high - at, n)) for s, (at, n) in enumerate(zip(starts, lengths, strict=False))
        ]
        found.append([Piece(*part) for part in parts if part[1] < part[2]])
    return found


def delivered(exchanges, parts):
    """What `all_to_all_single` gives each rank, of the rows that each sends."""
    ends = [[0, *itertools.accumulate(e.sent)] for e in exchanges]
    split = [[own[a:b] for a, b in itertools.pairwise(of)] for of, own in zip(ends, parts, strict=True)]
    for rank, exchange in enumerate(exchanges):
        assert list(exchange.received) == [len(of[rank]) for of in split], "both ends know how much comes"
    return [[row for of in split for row in of[rank]] for rank in range(len(exchanges))]


SAMPLES = st.lists(st.integers(1, 30), min_size=1, max_size=6)


@given(SAMPLES, st.integers(1, 6), st.floats(0, 0.1))
def test_keys_stand_in_front_of_the_first_sample_as_it_has_them(lengths, num_ranks, growth):
    of_ranks = cut_line(lengths, num_ranks, growth)
    lines = [Line(of_ranks, rank) for rank in range(num_ranks)]
    exchanges = [line.keys for line in lines]
    if None in exchanges:
        assert not any(exchanges)
        assert all(piece.first == 0 for of in of_ranks for piece in of)
        return
    tokens = [[(p.sample, t) for p in of for t in range(p.first, p.end)] for of in of_ranks]
    sent = []
    for exchange, own in zip(exchanges, tokens, strict=True):
        earlier = exchange.through(None)
        assert set(exchange.sent) <= {0, earlier.num_given}
        sent.append(own[len(own) - earlier.num_given :] * sum(n > 0 for n in exchange.sent))
    for of, taken in zip(of_ranks, delivered(exchanges, sent), strict=True):
        assert taken == [(of[0].sample, t) for t in range(of[0].first)] if of else not taken


@given(SAMPLES, st.integers(1, 6), st.floats(0, 0.1), st.integers(0, 9))
def test_a_convolution_is_given_the_last_tokens_in_front_of_a_rank(lengths, num_ranks, growth, most):
    of_ranks = cut_line(lengths, num_ranks, growth)
    exchanges = [Line(of_ranks, rank).keys for rank in range(num_ranks)]
    if None in exchanges:
        return
    limited = [exchange.limited(most) for exchange in exchanges]
    tokens = [[(p.sample, t) for p in of for t in range(p.first, p.end)] for of in of_ranks]
    sent = [
        [t for num in of.sent if num for t in own[len(own) - num :]] for of, own in zip(limited, tokens, strict=True)
    ]
    for of, taken in zip(of_ranks, delivered(limited, sent), strict=True):
        first = of[0].first if of else 0
        assert taken == [(of[0].sample, t) for t in range(max(0, first - most), first)]


@given(SAMPLES, st.integers(1, 6), st.floats(0, 0.1))
def test_samples_that_ranks_share_are_whole_in_the_line_of_what_they_send(lengths, num_ranks, growth):
    of_ranks = cut_line(lengths, num_ranks, growth)
    line = Line(of_ranks, 0).keys
    if line is None:
        return
    sent = []
    for (first, last), of in zip(line.shared, of_ranks, strict=True):
        own = [(p.sample, t) for p in of for t in range(p.first, p.end)]
        sent += own[:first] + own[len(own) - last :]
    holders = [s for s in range(len(lengths)) if sum(p.sample == s for of in of_ranks for p in of) > 1]
    assert sent == [(s, t) for s in holders for t in range(lengths[s])]
    assert list(line.lengths) == [lengths[s] for s in holders]


PROBLEM = make_problem("vision")


def state_values_charged(lengths, num_ranks):
    """What a rank is charged for a layer with one value of a state per token, on top of its own tokens'."""
    spec, load = PROBLEM.spec(LLM), np.array([[1.0], [sum(lengths)], [sum(n * n for n in lengths)]])
    layers = tuple((dataclasses.replace(kind, num_state_values=1), num) for kind, num in spec.layers)
    (with_state,), (without,) = (
        layer_bytes(of, PROBLEM.cost, load, RunMode(cp=num_ranks))
        for of in (dataclasses.replace(spec, layers=layers), spec)
    )
    return (with_state - without) / 2


@given(SAMPLES, st.integers(2, 6))
def test_no_rank_keeps_more_of_a_state_than_it_is_charged_with(lengths, num_ranks):
    of_ranks, charged = cut_line(lengths, num_ranks, 0.0), state_values_charged(lengths, num_ranks)
    for rank in range(num_ranks):
        if (keys := Line(of_ranks, rank).keys) is not None:
            more = sum(keys.lengths) / num_ranks - sum(keys.shared[rank])
            assert more <= charged + 1, "in place of its own tokens an even part of samples that are cut"


def test_a_rank_with_whole_samples_keeps_that_much():
    keys = Line(cut_line([28, 30], 2, 0.0), 0).keys
    assert (sum(keys.lengths) / 2 - sum(keys.shared[0]), state_values_charged([28, 30], 2)) == (14, 14.5)


@given(SAMPLES, st.integers(1, 6), st.floats(0, 0.1), st.data())
def test_every_row_comes_to_its_placeholder(lengths, num_ranks, growth, data):
    of_ranks = cut_line(lengths, num_ranks, growth)
    spans = {s: sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for s, n in enumerate(lengths)}
    encoded = [[] for _ in range(num_ranks)]
    for sample, (first, end) in spans.items():
        encoded[data.draw(st.integers(0, num_ranks - 1))].append((sample, np.arange(first, end)))
    made = []
    for rank, of in enumerate(of_ranks):
        own = {p.sample for p in of}
        known = [[e for e in items if e[0] in own or by == rank] for by, items in enumerate(encoded)]
        made.append(Line(of_ranks, rank).rows(known))
    exchanges = [exchange for _, exchange in made]
    rows = [[(s, t) for s, where in items for t in where.tolist()] for items in encoded]
    sent = [[own[i] for i in exchange.rows.tolist()] for own, exchange in zip(rows, exchanges, strict=True)]
    for of, (where, _), taken in zip(of_ranks, made, delivered(exchanges, sent), strict=True):
        tokens = [(p.sample, t) for p in of for t in range(p.first, p.end)]
        assert [tokens[i] for i in where.tolist()] == taken
        placeholders = {(s, t) for s, t in tokens if spans[s][0] <= t < spans[s][1]}
        assert placeholders == set(taken)
        assert where.dtype == torch.int64
