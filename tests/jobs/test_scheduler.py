"""The scheduler process against a key-value store, with hand-made ranks."""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace

import pytest

from dflop.errors import StoreError
from dflop.jobs.scheduler import Scheduler
from dflop.records import LLM, Correction, Factors, RunEvent, RunInput, StepPlan, from_dict
from dflop.run.batches import COMPARE, QUICK, TRAIN, GlobalBatches
from dflop.schedule.step_scheduler import schedule_step
from dflop.store.reader import Reader
from dflop.train import wire
from dflop.train.wire import PlanMessage, publish
from tests.builders import make_corrections, make_cost
from tests.jobs.scheduling import (
    AHEAD,
    NUM_STEPS,
    before,
    levels_of,
    measured,
    messages,
    observe,
    observe_all,
    scheduler,
    serve,
)
from tests.jobs.training import fresh
from tests.store.asking import fill
from tests.store.spooled import read_spool


@pytest.fixture
def run(schedulable, tmp_path):
    return fresh(schedulable, tmp_path)


def test_every_step_is_planned_from_its_inputs_alone(run, store):
    observe_all(store, run)
    service = scheduler(run)
    service._num_threads = 4
    serve(service, store)
    published = messages(store, range(NUM_STEPS))
    config, plan = run.config(), run.plan()
    batches = GlobalBatches(config, run.shapes())
    for step, message in enumerate(published):
        assert list(message.step_plan.sample_index) == [s.sample_index for s in batches.at(step)]
        assert {node.partition("/")[0] for node in message.spans} == {"vision", LLM}
        assert message.step_plan == schedule_step(
            run_id=run.run_id, step=step, plan=plan, batch=batches.at(step), cost=service._cost,
            max_concurrency=service._concurrency,
        )  # fmt: skip


def newest(store):
    return max((step for step in range(NUM_STEPS) if wire.is_published(store, step)), default=-1)


@pytest.mark.parametrize("num_threads", [1, AHEAD])
def test_it_works_only_so_far_ahead(run, store, num_threads):
    service, found = scheduler(run), []
    service._num_threads = num_threads
    ranks_that_see_how_far_it_goes(service, store, run, found)
    serve(service, store)
    assert found == [
        (step, min(step + AHEAD, NUM_STEPS - 1), min(step + AHEAD + 1, NUM_STEPS)) for step in range(NUM_STEPS)
    ]


def test_it_learns_from_plans_that_rank_0_made_itself_and_leaves_recording_any_to_it(run, store, monkeypatch):
    cost, batches = make_cost("vision"), GlobalBatches(run.config(), run.shapes())
    for step in range(NUM_STEPS):
        step_plan = schedule_step(
            run_id=run.run_id, step=step, plan=run.plan(), batch=batches.at(step), cost=cost, policy="quick"
        )
        assert publish(store, PlanMessage(step_plan, {}))
    service = measured(run, {"vision": 2.0, LLM: 2.0}, attempt=1)
    monkeypatch.setattr(wire, "first_unpublished", lambda *_: 0)
    serve(service, store)
    assert levels_of(service) == pytest.approx({"vision": 2.0, LLM: 2.0}, rel=0.05)
    assert read_spool(run.config().store, StepPlan) == []


def ranks_that_see_how_far_it_goes(service, store, run, found):
    """They report a step once the scheduler is as far ahead of it as it goes, and note (step, newest, next)."""

    def hear(store, seen, next_step):
        if newest(store) >= min(seen + AHEAD, NUM_STEPS - 1):
            found.append((seen, newest(store), next_step))
            observe(store, run, seen)

    before(service, "_listen", hear)


def test_one_that_is_behind_makes_quick_plans_until_it_has_caught_up(run, store):
    """Rank 0 asks for step 2 while the scheduler plans step 1."""
    service = scheduler(run)
    service._num_threads = 1
    before(service, "_message", lambda step, *_: wire.note(store, wire.ASKED, 2) if step == 1 else None)
    ranks_that_see_how_far_it_goes(service, store, run, [])
    serve(service, store)
    policies = [m.step_plan.policy for m in messages(store, range(NUM_STEPS))]
    assert QUICK not in policies[:2]
    assert policies[2] == QUICK
    assert QUICK not in policies[3:], "it was ahead again after step 2"
    (event,) = read_spool(run.config().store, RunEvent)
    assert (event.kind, event.step, event.job, event.attempt) == ("scheduler_behind", 2, TRAIN, 1)


def test_while_kernels_compile_nothing_is_planned(run, store):
    service = scheduler(run)
    service.warm_up.join()
    wire.note(store, wire.ASKED, 1)
    asked = []

    def is_alive():
        """Whether it was when it was last asked."""
        asked.append(newest(store))
        return len(asked) == 1

    service.warm_up = SimpleNamespace(is_alive=is_alive)
    ranks_that_see_how_far_it_goes(service, store, run, [])
    serve(service, store)
    assert asked[:2] == [-1, -1], "rank 0 makes a plan of its own"
    assert QUICK not in [m.step_plan.policy for m in messages(store, range(NUM_STEPS)[2:])]


def test_a_comparison_runs_what_it_says_however_late(run, store):
    service = scheduler(run, COMPARE)
    wire.note(store, wire.ASKED, 0)
    observe_all(store, run, 4)
    before(service, "_message", lambda step, *_: wire.note(store, wire.ASKED, step + 1))
    serve(service, store)
    plans = [m.step_plan for m in messages(store, range(4))]
    assert {p.run_id for p in plans} == {f"{run.run_id}/compare"}
    assert [p.policy for p in plans] == ["warmup", "warmup", "arrival", "balanced"]
    assert plans[2].sample_index == plans[3].sample_index
    assert read_spool(run.config().store, RunEvent) == []


def test_a_second_start_takes_over_where_the_first_left_off(run, store):
    class Killed(Exception):
        pass

    def die(_store, seen, _next_step):
        if seen == 1:
            raise Killed

    observe(store, run, 0)
    first = scheduler(run)
    before(first, "_listen", die)
    with pytest.raises(Killed):
        first.serve(store)  # and no close: its plans are in memory
    left = newest(store)
    wire.note(store, wire.ASKED, 2)
    second = Scheduler(run, run.config(), run.plan(), TRAIN, attempt=1, start=2)
    second.warm_up.join()  # without kernels it would be behind
    for step in range(left + 1, NUM_STEPS):
        observe(store, run, step)
    serve(second, store)
    assert newest(store) == NUM_STEPS - 1
    assert read_spool(run.config().store, RunEvent) == [], "it is not behind, it has just begun"


def test_corrections_outlive_the_scheduler_that_found_them(run, store):
    first = measured(run, {"vision": 2.0, LLM: 1.0}, attempt=1)
    serve(first, store)
    rows = read_spool(run.config().store, Correction)
    assert {c.level for c in rows if c.module == "vision"} >= {levels_of(first)["vision"]}
    assert from_dict(Factors, wire.noted(store, wire.FACTORS, {})) == first._learner.factors
    assert levels_of(first)["vision"] == pytest.approx(2.0, rel=0.1)
    second = Scheduler(run, run.config(), run.plan(), TRAIN, 1, 2, wire.noted(store, wire.LEARNED, {}))
    assert second._learner.factors == first._learner.factors


def test_a_fallback_schedule_of_the_first_steps_knows_what_earlier_runs_learned(run, store):
    class Noted(Exception):
        pass

    def found(store, *_):
        (factors,) = from_dict(Factors, wire.noted(store, wire.FACTORS, {})).modules[-1:]
        raise Noted(factors.module, round(factors.level, 3))

    fill(run.config().store, *make_corrections(LLM, (2.0,), table_id=f"{LLM}-tp1", observed_at_s=time.time()))
    service = scheduler(run)
    before(service, "_begin", found)
    with pytest.raises(Noted, match=r"llm.*2\.0"):
        service.serve(store)


def test_tables_that_are_not_in_the_store_are_named(run):
    plan = dataclasses.replace(run.plan(), table_ids=("gone",))
    with pytest.raises(StoreError, match="cost tables gone of the plan are not in the snapshot"):
        Scheduler(run, run.config(), plan, TRAIN, attempt=1)


def test_what_it_read_is_on_record_before_the_first_step(run):
    service = scheduler(run)
    service.close()
    with Reader(run.config().store) as reader:
        current = reader.snapshot
    (found,) = read_spool(run.config().store, RunInput)
    assert (found.run_id, found.job, found.attempt) == (run.run_id, TRAIN, 1)
    assert (found.snapshot_seq, found.snapshot_revision) == (current.seq, current.revision)
    assert found.table_ids == run.plan().table_ids
    assert found.data_profile_key == run.profile_key()
