from __future__ import annotations

import pytest
import torch

from dflop.parallel.topology import make_groups, seat_of
from dflop.records import LLM
from dflop.train.engine import Engine
from dflop.train.feed import Feed
from dflop.train.stages import llm_stage_of, make_stages
from tests.train import synthetic
from tests.train.ranks import run_ranks
from tests.train.synthetic import SyntheticSource, family, make_plan, make_shapes, make_step_plan, tiny_model

LAYOUT = {"vision": (1, 1), LLM: (2, 1)}
FEW, MANY = 6, 24


def run_step(rank, groups, num_microbatches, frozen):
    """(most sends held, whether the rank had work in every microbatch, gradients by name) of one rank."""
    plan = make_plan(LAYOUT, num_microbatches=num_microbatches)
    seat, width = seat_of(plan, rank), synthetic.HIDDEN_SIZE
    stages, _ = make_stages(tiny_model(), family(), seat, groups.tensor)
    trains = {(m.module, s): m.module not in frozen for m in plan.modules for s in range(m.parallel.pp)}
    for stage in stages:
        stage.requires_grad_(trains[seat.module, seat.stage])
    shapes = [s for s in make_shapes(40 * num_microbatches, seed=5, kinds=("image",)) if s.items][
        : 8 * num_microbatches
    ]
    feed = Feed(SyntheticSource(shapes), family(), plan, seat, llm_stage_of(stages))
    step = feed.prepare(make_step_plan(plan, shapes, 0, text_only_slot=False))
    engine = Engine(
        plan, seat, stages, groups, torch.device("cpu"), hidden_size=width, row_width=width, trains=trains
    )  # fmt: skip
    healthy, tokens = torch.ones(len(shapes), dtype=torch.bool), sum(s.num_supervised_tokens for s in shapes)
    trace = engine.run(step.microbatches, healthy=healthy, num_loss_tokens=tokens)
    has_gradients = any(p.grad is not None for stage in stages for p in stage.names.values())
    return trace.most_sends_held, len(trace.timings), has_gradients


def run_few_and_many(rank, folder, frozen):
    groups = make_groups(make_plan(LAYOUT, num_microbatches=1), rank, timeout_s=120)
    return [run_step(rank, groups, n, frozen) for n in (FEW, MANY)]


@pytest.mark.parametrize(
    "frozen", [(), ("vision",), ("vision", LLM)], ids=["all train", "frozen encoder", "all frozen"]
)
def test_what_is_held_for_sends_does_not_grow_with_the_number_of_microbatches(tmp_path, frozen):
    in_flight = (3, 2, 1)
    for rank, (few, many) in enumerate(run_ranks(run_few_and_many, 3, tmp_path, frozen)):
        assert (few[1], many[1]) == (FEW, MANY)
        # Forward at most one per microbatch in flight, backward one more until the next one arrives.
        assert many[0] == few[0] <= in_flight[rank] + 1
        assert many[2] == (("vision" if rank == 0 else LLM) not in frozen)
