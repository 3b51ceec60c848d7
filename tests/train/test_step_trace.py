"""Spans of a step, the bytes that ranks send and receive in it, and the sends that they hold."""

from __future__ import annotations

import itertools

import pytest

from dflop.records import LLM
from dflop.train.sends import Sends
from tests.train import synthetic
from tests.train.rank import Rank
from tests.train.ranks import run_ranks
from tests.train.synthetic import SyntheticSource, assign, family, make_plan, make_shapes, make_step_plan, tiny_model

LAYOUT = {"vision": (1, 2), LLM: (2, 1)}
NUM_MICROBATCHES = 4
SHAPES = make_shapes(12, seed=3, kinds=("image",))


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


CHAIN = {"vision": (1, 1), LLM: (2, 1)}
FEW, MANY = 4, 9


def run_step(rank, num_microbatches, frozen):
    """(most sends held, in how many microbatches the rank had work, whether it has gradients) of one rank."""
    plan = make_plan(CHAIN, num_microbatches=num_microbatches)
    it = Rank(rank, plan, family(), tiny_model(), frozen=frozen)
    batch = [s for s in make_shapes(60, seed=5, kinds=("image",)) if s.items][:num_microbatches]
    step_plan = assign(plan, batch, 0, slots=range(num_microbatches), replica=lambda dp: 0, shuffled=range)
    held = [0]
    with pytest.MonkeyPatch.context() as patched:
        send = Sends.send

        def counted(self, *args, **options):
            send(self, *args, **options)
            held.append(sum(map(len, self._held.values())))

        patched.setattr(Sends, "send", counted)
        trace = it.step(SyntheticSource(batch), batch, step_plan)
    return max(held), len(trace.timings), any(p.grad is not None for p in it.names.values())


def run_few_and_many(rank, folder, frozen):
    return [run_step(rank, n, frozen) for n in (FEW, MANY)]


@pytest.mark.parametrize("frozen", [(), ("vision",)], ids=["all train", "frozen encoder"])
def test_what_is_held_for_sends_does_not_grow_with_the_number_of_microbatches(tmp_path, frozen):
    in_flight = (3, 2, 1)
    for rank, (few, many) in enumerate(run_ranks(run_few_and_many, 3, tmp_path, frozen)):
        assert (few[1], many[1]) == (FEW, MANY)
        # Forward at most one per microbatch in flight, backward one more until the next one arrives.
        assert many[0] == few[0] <= in_flight[rank] + 1
        assert many[2] == (("vision" if rank == 0 else LLM) not in frozen)
