from __future__ import annotations

import pytest

from dflop.records import LLM
from tests.train.rank import Rank
from tests.train.ranks import run_ranks
from tests.train.synthetic import SyntheticSource, family, make_plan, make_shapes, make_step_plan, tiny_model

LAYOUT = {"vision": (1, 1), LLM: (2, 1)}
FEW, MANY = 6, 24


def run_step(rank, num_microbatches, frozen):
    """(most sends held, in how many microbatches the rank had work, whether it has gradients) of one rank."""
    plan = make_plan(LAYOUT, num_microbatches=num_microbatches)
    it = Rank(rank, plan, family(), tiny_model(), frozen=frozen)
    shapes = [s for s in make_shapes(40 * num_microbatches, seed=5, kinds=("image",)) if s.items][
        : 6 * num_microbatches
    ]
    trace = it.step(SyntheticSource(shapes), shapes, make_step_plan(plan, shapes, 0, text_only_slot=False))
    return trace.most_sends_held, len(trace.timings), any(p.grad is not None for p in it.names.values())


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
