from __future__ import annotations

import dataclasses
import sys
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dflop.records import (
    LLM,
    Factors,
    MicrobatchSpan,
    ModuleFactors,
    ModuleWork,
    NodeFactor,
    StepObservation,
    StepPlan,
    from_dict,
    to_dict,
)
from dflop.train import wire
from dflop.train.wire import PlanMessage, RankTimes
from tests.train.synthetic import make_plan, make_shapes, make_step_plan


def message(step, policy="balanced"):
    plan = make_plan({"vision": (1, 2), LLM: (2, 1)}, num_microbatches=3)
    step_plan = make_step_plan(plan, make_shapes(7, seed=step), step)
    predicted = {("vision", 0, 1): [(0, 3, 400, 52_000, 0.125, 0.25)], (LLM, 1, 0): [(2, 1, 60, 3600, 1e-3, 2e-3)]}
    return PlanMessage.of(dataclasses.replace(step_plan, policy=policy), predicted)


def times(step, rank):
    return RankTimes(step, rank, 0.5, ((0, 0.1), (2, 1 / 3)))


def send(store, step, rank):
    wire.send_times(store, times(step, rank))


NUMBERS = st.integers(0, 2**31 - 1)
NODES = st.tuples(st.sampled_from(["vision", "audio", LLM]), st.integers(0, 3), st.integers(0, 99))
PREDICTED = st.tuples(NUMBERS, NUMBERS, st.integers(0, 2**62), *[st.floats(0, 1e9, allow_subnormal=True)] * 2)


@st.composite
def works(draw, module):
    num_items, num_microbatches, dp = draw(st.integers(0, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    columns = [draw(st.tuples(*[NUMBERS] * num_items)) for _ in range(3)]
    slots = [[[] for _ in range(dp)] for _ in range(num_microbatches)]
    for item in draw(st.permutations(range(num_items))):
        slots[draw(st.integers(0, num_microbatches - 1))][draw(st.integers(0, dp - 1))].append(item)
    return ModuleWork(module, *columns, tuple(tuple(map(tuple, of_one)) for of_one in slots))


@given(
    st.lists(st.integers(0, 2**62)), st.integers(1, 9), st.tuples(works("vision"), works(LLM)),
    st.floats(0, 1e6), st.dictionaries(NODES, st.dictionaries(st.integers(0, 63), PREDICTED)),
)  # fmt: skip
def test_a_plan_survives_the_wire_to_the_last_bit(sample_index, num_microbatches, work, seconds, predicted):
    step_plan = StepPlan("run", 5, "balanced", tuple(sample_index), num_microbatches, work, 17, seconds, seconds / 3)
    rows = {node: [(k, *values) for k, values in of_node.items()] for node, of_node in predicted.items()}
    found = PlanMessage.decode(PlanMessage.of(step_plan, rows).encode())
    assert repr(found.step_plan) == repr(step_plan), "numbers of Python's own types"
    for node, of_node in predicted.items():
        assert repr(found.predicted(node)) == repr(of_node)
    assert found.predicted(("other", 0, 0)) == {}


def test_reading_a_plan_takes_as_many_calls_whatever_the_global_batch():
    """Number by number it holds the interpreter from the thread that launches kernels for 45 ms at 4,096 samples."""
    plan, counts = make_plan({"vision": (1, 2), LLM: (2, 1)}, num_microbatches=3), []
    for num_samples in (30, 300):
        step_plan = make_step_plan(plan, make_shapes(num_samples, seed=1), 0)
        text, calls = PlanMessage(step_plan, {}).encode(), Counter()
        PlanMessage.decode(text)  # what is worked out once
        sys.setprofile(lambda _frame, event, _arg, calls=calls: calls.update([event]))
        PlanMessage.decode(text)
        sys.setprofile(None)
        counts.append(calls)
    assert counts[0] == counts[1]


def test_factors_survive_the_wire(store):
    factors = Factors(
        (ModuleFactors("vision", 1.25, (300, 900), (1.0, 2.125, 1.25)), ModuleFactors(LLM, 0.9)),
        (NodeFactor(LLM, 1, 0, 1.6),),
    )
    assert wire.noted(store, wire.FACTORS, {}) == {}
    wire.note(store, wire.FACTORS, to_dict(factors))
    assert from_dict(Factors, wire.noted(store, wire.FACTORS, {})) == factors
    wire.note(store, wire.FACTORS, to_dict(Factors()))
    assert from_dict(Factors, wire.noted(store, wire.FACTORS, {})) == Factors() == from_dict(Factors, {})


def test_a_step_is_taken_once_and_whole(store):
    send(store, 2, 1)
    assert wire.take_times(store, 2, 2) is None
    send(store, 2, 0)
    assert wire.take_times(store, 2, 2) == [times(2, 0), times(2, 1)]
    assert wire.take_times(store, 2, 2) is None


def test_what_is_sent_of_an_observation_is_the_computing():
    span = MicrobatchSpan(3, 1, 10, 100, 1.0, 1.0, 5.0, 0.5, 0.25, 5.0, 0.125, 0.5)
    seen = StepObservation(
        run_id="r", attempt=1, step=4, policy="balanced", rank=1, module=LLM, stage=0, dp_rank=0, predicted_step_s=8.0,
        step_s=9.0, busy_s=1.0, data_wait_s=0.0, schedule_wait_s=0.0, reduce_s=0.0, optimizer_s=0.0, loss=1.0,
        grad_norm=1.0, num_supervised_tokens=10, observed_at_s=1.0, spans=(span,),
    )  # fmt: skip
    assert RankTimes.of(seen) == RankTimes(4, 1, 9.0, ((3, 0.625),), stretch=8.8)


def test_what_was_overwritten_is_missing_and_its_successor_is_left_alone(store):
    late = 5 + wire.NUM_SLOTS
    for rank in (0, 1):
        send(store, 5, rank)
    assert wire.take_times(store, late, 2) is None
    before = store.num_keys()
    send(store, late, 1)
    assert store.num_keys() == before, "nothing piles up while nobody listens"
    assert wire.take_times(store, 5, 2) == [times(5, 0)]
    send(store, late, 0)
    assert [found.rank for found in wire.take_times(store, late, 2)] == [0, 1]
