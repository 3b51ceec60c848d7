from __future__ import annotations

import pytest

from dflop.train import wire
from dflop.train.plan_source import Guard, Patience, PlanSource
from tests.train.test_wire import message


def quick_message(step):
    return message(step, "quick")


class Told:
    """What a rank 0 said: steps for which it waited too long for a live scheduler, and plans to record."""

    def __init__(self):
        self.late, self.plans = [], []


def source(store, *, quick=quick_message, alive=True, patience=None, timeout_s=20):
    """(rank 0's source, what it said); `alive` may be a callable."""
    told = Told()
    guard = Guard(
        quick,
        alive if callable(alive) else lambda: alive,
        patience or Patience(0.05, None),
        lambda step, kind, detail: told.late.append((step, kind)),
        told.plans.append,
    )
    return PlanSource(store, 0, timeout_s=timeout_s, guard=guard), told


def follower(store, timeout_s=20):
    return PlanSource(store, 1, timeout_s=timeout_s)


FOR_EVER = Patience(1e9, None)


def test_the_schedulers_plan_is_used(store):
    assert wire.publish(store, message(0))
    plans, told = source(store, alive=False)
    assert plans.get(0) == follower(store).get(0) == message(0)
    assert (told.late, told.plans) == ([], [message(0).step_plan])


@pytest.mark.parametrize("answers", [[True, True, True, False], [False]])
def test_a_scheduler_that_is_dead_or_dies_while_rank_0_waits_is_not_waited_for(store, answers):
    answers = iter(answers)
    plans, told = source(store, alive=lambda: next(answers), patience=FOR_EVER)
    assert plans.get(0).step_plan.policy == "quick"
    assert (told.late, told.plans) == ([], [quick_message(0).step_plan])


def test_a_late_scheduler_is_waited_for_only_so_long(store):
    plans, told = source(store)
    assert plans.get(0).step_plan.policy == "quick"
    assert told.late == [(0, "scheduler_late")]
    assert not wire.publish(store, message(0)), "the late plan replaced the one in use"
    assert follower(store).get(0) == plans.get(0)


@pytest.mark.parametrize("alive", [True, False])
def test_the_first_writer_wins_even_against_a_quick_plan(store, alive):
    """The scheduler's plan arrives while rank 0 makes its own, long before its patience ends: it is used."""

    def overtaken(step):
        assert wire.publish(store, message(step))
        return quick_message(step)

    plans, told = source(store, quick=overtaken, alive=alive, patience=FOR_EVER)
    assert plans.get(0) == message(0)
    assert (told.late, told.plans) == ([], [message(0).step_plan])


def test_plans_that_every_rank_has_run_make_room_but_cannot_be_published_again(store):
    plans, _ = source(store)
    for step in range(3):
        wire.publish(store, message(step))
        assert plans.get(step) == message(step)
        assert wire.noted(store, wire.ASKED, -1) == step
    assert len(store.get("plan/0")) < 10
    assert not wire.publish(store, message(0))
    assert follower(store).get(1) == message(1), "a rank may still need it"


def test_plans_of_later_steps_are_taken_as_far_as_they_are_there(store):
    plans = follower(store)
    for step in (0, 1, 2, 4):
        wire.publish(store, message(step))
    assert [p.step for p in plans.published_after(0, 8)] == [1, 2]
    assert [p.step for p in plans.published_after(0, 1)] == [1]
    assert plans.published_after(2, 8) == []
    assert plans.published_after(0, 8)[0] is plans.get(1).step_plan, "a plan is read once"


def test_patience_is_a_share_of_the_shortest_of_the_last_steps():
    patience = Patience(5.0, 0.5)
    assert patience.asked(100.0, 0.0) == 5.0, "nothing runs yet, the scheduler may be starting"
    assert patience.asked(107.0, 3.0) == 1.5, "no step was timed yet"
    assert patience.asked(109.0, 3.0) == 1.0
    assert patience.asked(119.0, 3.0) == 1.0, "a pause makes nobody more patient"
    assert patience.asked(120.0, 3.0) == 0.5
    for second in range(124, 164, 4):
        latest = patience.asked(float(second), 3.0)
    assert latest == 2.0, "steps became longer for good"
    unchanging = Patience(60.0, None)
    assert {unchanging.asked(float(t), 1.0) for t in range(5)} == {60.0}
