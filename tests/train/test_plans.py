from __future__ import annotations

import dataclasses

import pytest

from dflop.errors import TrainError
from dflop.records import LLM
from dflop.train.plans import PlanMessage, PlanSource, open_store, publish, send_observation, take_observation
from tests.train.synthetic import make_plan, make_shapes, make_step_plan


def message(step, policy="balanced"):
    plan = make_plan({"vision": (1, 2), LLM: (2, 1)}, num_microbatches=3)
    step_plan = make_step_plan(plan, make_shapes(7, seed=step), step)
    predicted = {("vision", 0, 1, 0): (3, 400, 52_000, 0.125, 0.25), (LLM, 1, 0, 2): (1, 60, 3600, 1e-3, 2e-3)}
    return PlanMessage(dataclasses.replace(step_plan, policy=policy), predicted)


@pytest.fixture
def store():
    return open_store("127.0.0.1", 0, is_server=True, timeout_s=20)


def source(store, rank=0, *, fallback=lambda step: message(step, "arrival"), alive=True, patience_s=0.1, timeout_s=20):
    """(source, what it said): `alive` may be a callable."""
    said = []
    plans = PlanSource(
        store,
        rank,
        fallback=fallback,
        scheduler_is_alive=alive if callable(alive) else lambda: alive,
        patience_s=patience_s,
        timeout_s=timeout_s,
        on_fallback=lambda used, why: said.append((used.step_plan.step, why)),
    )
    return plans, said


def test_a_message_survives_the_wire():
    sent = message(3)
    assert PlanMessage.decode(sent.encode()) == sent
    assert PlanMessage.decode(sent.encode().encode()) == sent


@pytest.mark.parametrize("rank", [0, 1])
def test_the_schedulers_plan_is_used(store, rank):
    assert publish(store, message(0))
    plans, said = source(store, rank, alive=False)
    assert plans.get(0) == message(0)
    assert said == []


def test_a_dead_scheduler_is_not_waited_for(store):
    plans, said = source(store, alive=False, patience_s=1e9)
    assert plans.get(0) == message(0, "arrival")
    assert said == [(0, "the scheduler is not running")]


def test_a_scheduler_that_dies_while_rank_0_waits_is_noticed(store):
    answers = iter([True, True, False])
    plans, said = source(store, alive=lambda: next(answers), patience_s=1e9)
    assert plans.get(0).step_plan.policy == "arrival"
    assert said == [(0, "the scheduler is not running")]


def test_a_late_scheduler_is_waited_for_only_so_long(store):
    plans, said = source(store, patience_s=0.1)
    assert plans.get(0).step_plan.policy == "arrival"
    assert said == [(0, "the scheduler was not ready in 0.1 s")]
    assert not publish(store, message(0)), "the late plan replaced the one in use"
    other, _ = source(store, rank=1)
    assert other.get(0) == plans.get(0)


def test_the_first_writer_wins_even_against_the_fallback(store):
    def overtaken(step):
        assert publish(store, message(step))
        return message(step, "arrival")

    plans, said = source(store, alive=False, fallback=overtaken)
    assert plans.get(0) == message(0)
    assert said == []
    assert not publish(store, message(0, "another"))


def test_only_rank_0_falls_back(store):
    plans, said = source(store, rank=1, alive=False, timeout_s=0.1)
    with pytest.raises(TrainError, match=r"no plan for step 4 after 0\.1 s") as caught:
        plans.get(4)
    assert (caught.value.where, said) == ("rank 1", [])


def test_plans_that_every_rank_has_run_make_room_but_cannot_be_published_again(store):
    plans, _ = source(store)
    for step in range(3):
        publish(store, message(step))
        assert plans.get(step) == message(step)
    assert len(store.get("plan/0")) < 10
    assert not publish(store, message(0))
    assert PlanMessage.decode(store.get("plan/1")) == message(1), "a rank may still need it"


def test_an_observation_is_taken_once(store):
    assert take_observation(store, 2, 1) is None
    send_observation(store, 2, 1, {"step_s": 0.5})
    assert take_observation(store, 2, 0) is None
    assert take_observation(store, 2, 1) == {"step_s": 0.5}
    assert take_observation(store, 2, 1) is None
