from __future__ import annotations

import pytest

from dflop.train import wire
from dflop.train.plan_source import Guard, Patience, PlanSource
from dflop.train.wire import RECORD_EVERY_STEPS
from tests.train.test_wire import message


def quick_message(step):
    return message(step, "quick", start=0)


class Told:
    """What a rank 0 said: quick plans as (step, whether it waited for a live scheduler), and unrecorded steps."""

    def __init__(self):
        self.quick, self.unrecorded = [], []


def source(store, *, quick=quick_message, alive=True, patience=None, timeout_s=20):
    """(rank 0's source, what it said); `alive` may be a callable."""
    told = Told()
    guard = Guard(
        quick,
        alive if callable(alive) else lambda: alive,
        patience or Patience(0.05, None),
        lambda step_plan, waited_s: told.quick.append((step_plan.step, waited_s is not None)),
        lambda step_plan: told.unrecorded.append(step_plan.step),
    )
    return PlanSource(store, 0, timeout_s=timeout_s, guard=guard), told


def follower(store, timeout_s=20):
    return PlanSource(store, 1, timeout_s=timeout_s)


def note_recorded(store, start, step):
    """Returns once every connection sees it: to set a key is not to wait until it is set."""
    wire.note_recorded(store, start, step)
    assert wire.recorded_step(store, start) == step


FOR_EVER = Patience(1e9, None)


def test_the_schedulers_plan_is_used(store):
    assert wire.publish(store, message(0))
    plans, told = source(store, alive=False)
    assert plans.get(0) == follower(store).get(0) == message(0)
    assert told.quick == []


@pytest.mark.parametrize("answers", [[True, True, True, False], [False]])
def test_a_scheduler_that_is_dead_or_dies_while_rank_0_waits_is_not_waited_for(store, answers):
    answers = iter(answers)
    plans, told = source(store, alive=lambda: next(answers), patience=FOR_EVER)
    assert plans.get(0).step_plan.policy == "quick"
    assert told.quick == [(0, False)]


def test_a_late_scheduler_is_waited_for_only_so_long(store):
    plans, told = source(store)
    assert plans.get(0).step_plan.policy == "quick"
    assert told.quick == [(0, True)]
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
    assert told.quick == []


def test_plans_that_every_rank_has_run_make_room_but_cannot_be_published_again(store):
    plans, _ = source(store)
    for step in range(3):
        wire.publish(store, message(step))
        assert plans.get(step) == message(step)
        assert wire.asked_step(store) == step
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
    assert plans.published_after(0, 8)[0] == plans.get(1).step_plan


def test_plans_that_no_scheduler_lived_to_record_are_handed_on_once(store):
    plans, told = source(store, alive=False)
    for step, start in enumerate((1, 1, 1, 2, 2)):
        wire.publish(store, message(step, start=start))
        plans.get(step)
    plans.get(5)
    note_recorded(store, 1, 1)
    note_recorded(store, 2, 3)
    assert told.unrecorded == [], "a scheduler that lives will yet write them"
    plans.settle()
    assert told.unrecorded == [2, 4]
    assert told.quick == [(5, False)], "rank 0 records its own plans itself"
    plans.settle()
    assert told.unrecorded == [2, 4]


def test_a_checkpoint_leaves_no_plan_behind_that_is_not_recorded(store):
    plans, told = source(store)
    for step in range(5):
        wire.publish(store, message(step))
        plans.get(step)
    note_recorded(store, 1, 1)
    plans.settle(before=4)
    assert told.unrecorded == [2, 3]
    plans.settle()
    assert told.unrecorded == [2, 3, 4]


def test_a_live_scheduler_is_asked_to_record_what_a_checkpoint_leaves_behind(store):
    def records_when_asked():
        if wire.wanted_record(store) == 3:
            note_recorded(store, 1, 4)
        return True

    plans, told = source(store, alive=records_when_asked, patience=FOR_EVER)
    for step in range(5):
        wire.publish(store, message(step))
        plans.get(step)
    follower(store).leave_behind(4)
    assert wire.wanted_record(store) == -1, "no rank but 0 leaves any behind"
    plans.leave_behind(4)
    plans.settle()
    assert told.unrecorded == []


def test_a_plan_that_is_long_unrecorded_is_not_kept_for_ever(store):
    plans, told = source(store)
    for step in range(2 * RECORD_EVERY_STEPS + 3):
        wire.publish(store, message(step))
        plans.get(step)
    assert told.unrecorded == [0, 1, 2]


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
