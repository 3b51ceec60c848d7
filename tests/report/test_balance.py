from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dflop.report.balance import evenness, evenness_table, shares_table, stage_shares
from dflop.report.comparison import BatchPair
from dflop.report.observed_steps import MeasuredStep
from tests.builders import make_plan
from tests.report.runs import make_span, observe

PLAN = make_plan({"vision": 1, "llm": 1}, num_microbatches=2)


def step(number: int, policy: str, seconds: tuple[float, float]) -> MeasuredStep:
    """The LLM's two microbatches take the given seconds, vision is alike in both policies."""
    spans = [make_span(k, s / 3, 2 * s / 3) for k, s in enumerate(seconds)]
    vision = [make_span(k, 0.01, 0.02) for k in range(2)]
    return MeasuredStep(
        number,
        policy,
        (
            observe(number, 0, policy=policy, module="vision", step_s=2.0, busy_s=0.5, update_s=0.2, spans=vision),
            observe(number, 1, policy=policy, step_s=2.0, busy_s=sum(seconds), update_s=0.4, spans=spans),
        ),
    )


PAIR = BatchPair((0,), (step(0, "arrival", (0.3, 0.9)),), (step(1, "balanced", (0.6, 0.6)),))


def test_shares_of_every_stage_add_up_and_come_in_the_plans_order() -> None:
    found = stage_shares([PAIR], PLAN)
    assert [(s.stage, s.policy) for s in found] == [
        ("vision pp0", "arrival"), ("vision pp0", "balanced"), ("llm pp0", "arrival"), ("llm pp0", "balanced"),
    ]  # fmt: skip
    assert [s.busy_frac for s in found] == pytest.approx([0.25, 0.25, 0.6, 0.6])
    assert [s.update_frac for s in found] == pytest.approx([0.1, 0.1, 0.2, 0.2])
    for share in found:
        assert share.busy_frac + share.wait_frac + share.update_frac == pytest.approx(1)
        assert share.idle_frac == pytest.approx(1 - share.busy_frac)
    assert shares_table(found).rows[2] == ("llm pp0", "data-blind", "60.0 %", "20.0 %", "20.0 %", "40.0 %")


def test_evenness_is_the_largest_microbatch_over_the_mean() -> None:
    found = {(e.stage, e.policy): e for e in evenness(PAIR, PLAN)}
    assert found["llm pp0", "arrival"].max_over_mean == pytest.approx(1.5)
    assert found["llm pp0", "balanced"].max_over_mean == pytest.approx(1.0)
    assert found["llm pp0", "arrival"].seconds == (pytest.approx((0.3,)), pytest.approx((0.9,)))
    assert evenness_table([PAIR, PAIR], PLAN).rows == (
        ("vision pp0", "1.00x", "1.00x"),
        ("llm pp0", "1.50x", "1.00x"),
    )


def test_of_a_tensor_parallel_group_the_slowest_rank_speaks() -> None:
    (arrival,) = PAIR.arrival
    slower = replace(arrival.ranks[1], rank=2, spans=(make_span(0, 0.2, 0.4), *arrival.ranks[1].spans[1:]))
    group = replace(PAIR, arrival=(replace(arrival, ranks=(*arrival.ranks, slower)),))
    found = {(e.stage, e.policy): e for e in evenness(group, PLAN)}
    assert found["llm pp0", "arrival"].seconds == (pytest.approx((0.6,)), pytest.approx((0.9,)))


def test_microbatches_without_work_are_none() -> None:
    idle = replace(PAIR.arrival[0], ranks=tuple(replace(r, spans=()) for r in PAIR.arrival[0].ranks))
    found = {(e.stage, e.policy): e for e in evenness(replace(PAIR, arrival=(idle,)), PLAN)}
    assert math.isnan(found["llm pp0", "arrival"].max_over_mean)
