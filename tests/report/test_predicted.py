"""The simulator run again on what ranks recorded: the same step that the scheduler had predicted."""

from dataclasses import replace

import pytest

from dflop.records import LLM
from dflop.report.predicted import fits, plan_that_ran, simulate_again
from dflop.simulate.step import step_nodes
from tests.builders import make_inline_plan, make_plan
from tests.report.detailed import SPLIT, batch_of, observe_step, plan_step

PLANS = {
    "split": SPLIT,
    "deep encoder": make_plan({"vision": 2, LLM: 1}, llm_pp=2, encoder_pp=2, num_microbatches=3),
    "inline": make_inline_plan(2, pp=3, modules=("vision", "audio", LLM)),
}
BATCH = batch_of(1)
STEP_PLAN = plan_step(SPLIT, BATCH, 0, "balanced", "run")


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("policy", ["arrival", "balanced"])
def test_it_is_the_prediction_that_the_step_was_sent_with(name: str, policy: str) -> None:
    plan, batch = PLANS[name], batch_of(1)
    step_plan = plan_step(plan, batch, 3, policy, "run")
    again = simulate_again(plan, step_plan, observe_step(plan, step_plan, batch, noise=0.3))
    assert again is not None
    assert again.pipeline_s == pytest.approx(step_plan.predicted_step_s), "no link costs here: messages take no time"


def test_a_step_that_ran_as_predicted_ran_when_predicted() -> None:
    seen = observe_step(SPLIT, STEP_PLAN, BATCH, noise=0.0)
    again = simulate_again(SPLIT, STEP_PLAN, seen)
    shared = simulate_again(SPLIT, STEP_PLAN, seen, 2)
    assert again is not None
    assert shared is not None
    assert shared.pipeline_s > 1.2 * again.pipeline_s, "where processes share cores everything takes longer"
    for rank in seen:
        told = {(op.microbatch, op.phase): op for op in again.of((rank.module, rank.stage, rank.dp_rank))}
        for span in rank.spans:
            forward, backward = told[span.microbatch, "F"], told[span.microbatch, "B"]
            assert (forward.start_s, forward.duration_s) == pytest.approx((span.forward_start_s, span.forward_s))
            assert (backward.start_s, backward.duration_s) == pytest.approx((span.backward_start_s, span.backward_s))


def test_everybody_waits_for_what_ended_before() -> None:
    batch = batch_of(2)
    step_plan = plan_step(SPLIT, batch, 0, "arrival", "run")
    again = simulate_again(SPLIT, step_plan, observe_step(SPLIT, step_plan, batch))
    assert again is not None
    ops = {(op.node, op.microbatch, op.phase): op for own in again.ops.values() for op in own}
    assert again.waits
    for before, behind in again.waits:
        assert before[0] != behind[0], "between nodes"
        assert before[1:] == behind[1:], "of one microbatch, in one direction"
        assert ops[before].start_s + ops[before].duration_s <= ops[behind].start_s + 1e-12
    assert {node for (node, _, _), _ in again.waits} == set(step_nodes(SPLIT))


def test_what_was_not_predicted_is_not_made_up() -> None:
    step_plan, seen = STEP_PLAN, observe_step(SPLIT, STEP_PLAN, BATCH)
    blank = [
        replace(rank, spans=tuple(replace(s, predicted_forward_s=0.0, predicted_backward_s=0.0) for s in rank.spans))
        for rank in seen
    ]
    assert simulate_again(SPLIT, step_plan, blank) is None
    assert simulate_again(SPLIT, step_plan, seen[1:]) is None, "a rank said nothing"
    assert simulate_again(SPLIT, replace(step_plan, work=()), seen) is None
    assert simulate_again(PLANS["inline"], step_plan, seen) is None
    wild = replace(seen[0], spans=(replace(seen[0].spans[0], microbatch=99),))
    assert simulate_again(SPLIT, step_plan, [wild, *seen[1:]]) is None


def test_a_step_plan_fits_the_layout_it_was_made_for() -> None:
    assert fits(SPLIT, STEP_PLAN)
    assert fits(replace(SPLIT, predicted_step_s=9.0), STEP_PLAN)
    assert not fits(make_plan({"vision": 1, "audio": 1, LLM: 1}, llm_pp=2), STEP_PLAN)
    assert not fits(replace(SPLIT, num_microbatches=5), STEP_PLAN)


def test_of_a_step_that_was_done_again_the_plan_counts_that_was_sent() -> None:
    first, second, third = (replace(STEP_PLAN, predicted_step_s=s) for s in (1.0, 2.0, 3.0))
    assert plan_that_ran([first, second, third], 2.0) is second
    assert plan_that_ran([first, second, third], 9.0) is third
    assert plan_that_ran([], 1.0) is None
