"""Spans of a step: nothing overlaps, nothing is missing, and the bytes that one rank sends another receives."""

from __future__ import annotations

import itertools

import pytest

from dflop.records import LLM
from dflop.train.trace import WHOLE_STEP, StepTrace, Timing, Visit
from tests.train import synthetic
from tests.train.rank import Rank
from tests.train.ranks import run_ranks
from tests.train.synthetic import SyntheticSource, family, make_plan, make_shapes, make_step_plan, tiny_model

LAYOUT = {"vision": (1, 2), LLM: (2, 1)}
NUM_MICROBATCHES = 4
SHAPES = make_shapes(12, seed=3, kinds=("image",))


def test_spans_are_what_lies_between_the_clock_readings():
    timing = Timing(forward_start_s=1.5, forward_s=2.0, backward_start_s=6.0, backward_s=3.0)
    visits = [Visit(True, 7, 1.0, 4.0, 100, 20), Visit(False, 7, 5.0, 9.5, 30, 0)]
    trace = StepTrace(0.0, {7: timing}, started_at_s=50.0, elapsed_s=10.0, visits=visits)
    assert list(trace.spans(step_started_at_s=49.0)) == [
        ("receive_wait", 7, 2.0, 0.5, 100),
        ("forward", 7, 2.5, 2.0, 0),
        ("send", 7, 4.5, 0.5, 20),
        ("receive_wait", 7, 6.0, 1.0, 30),
        ("backward", 7, 7.0, 3.0, 0),
        ("send", 7, 10.0, 0.5, 0),
        ("send", WHOLE_STEP, 10.5, 0.5, 0),
    ]


def traced_step(rank, folder):
    """(trace, spans) of one rank in a step with an encoder on two ranks and the LLM on two stages."""
    plan = make_plan(LAYOUT, num_microbatches=NUM_MICROBATCHES)
    trace = Rank(rank, plan, family(), tiny_model()).step(
        SyntheticSource(SHAPES), SHAPES, make_step_plan(plan, SHAPES, 0)
    )
    return trace, list(trace.spans(trace.started_at_s))


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    return run_ranks(traced_step, 4, tmp_path_factory.mktemp("traced"))


def test_spans_tile_the_engines_part_of_the_step(traced):
    for trace, spans in traced:
        assert all(span.duration_s >= 0 for span in spans)
        for one, next_one in itertools.pairwise(spans):
            assert one.start_s + one.duration_s <= next_one.start_s + 1e-9
        assert sum(span.duration_s for span in spans) <= trace.elapsed_s
        busy_s = sum(span.duration_s for span in spans if span.name in ("forward", "backward"))
        assert busy_s == pytest.approx(trace.busy_s)
        for name in ("forward", "backward"):
            assert sorted(span.microbatch for span in spans if span.name == name) == sorted(trace.timings)


def test_bytes_are_those_of_rows_and_hidden_states_and_of_their_gradients(traced):
    num_rows = sum(item.num_rows for shape in SHAPES for item in shape.items)
    num_tokens = sum(shape.num_llm_tokens for shape in SHAPES)
    one_way = 4 * synthetic.HIDDEN_SIZE * (num_rows + num_tokens)
    for name in ("send", "receive_wait"):
        assert sum(span.num_bytes for _, spans in traced for span in spans if span.name == name) == 2 * one_way
    # The LLM's first stage takes rows forward and gradients of hidden states backward.
    assert sum(span.num_bytes for span in traced[2][1] if span.name == "receive_wait") == one_way
