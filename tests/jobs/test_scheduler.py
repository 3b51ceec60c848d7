"""The scheduler process against a key-value store, with hand-made ranks."""

from __future__ import annotations

import dataclasses
import errno
from concurrent.futures import Future

import pytest

from dflop.config import dump_config
from dflop.errors import StoreError
from dflop.jobs.rundir import RunDir
from dflop.jobs.scheduler import Scheduler
from dflop.jobs.steps import COMPARE, QUICK, TRAIN, GlobalBatches
from dflop.parallel.topology import seats
from dflop.records import LLM, Correction, RunEvent, RunInput, StepPlan
from dflop.schedule.attribution import bucket_seconds
from dflop.schedule.scheduler import schedule_step
from dflop.store import durable
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.spool import SpoolWriter, read_spool
from dflop.train import wire
from dflop.train.wire import PlanMessage, RankTimes, open_store, publish
from tests.builders import make_cost, make_inline_plan, make_plan, make_table, random_batch
from tests.jobs.configs import make_config

NUM_STEPS, AHEAD = 6, 2


@pytest.fixture
def run(tmp_path):
    """A planned run whose cost tables are in the store."""
    overrides = (f"train.num_steps={NUM_STEPS}", f"train.schedule_ahead={AHEAD}", "plan.global_batch_size=8")
    config = make_config(tmp_path, *overrides, "compare.num_batches=1", "compare.num_repeats=1")
    run = RunDir(tmp_path / "runs" / "small-1")
    run.path.mkdir(parents=True)
    run.config_file.write_text(dump_config(config))
    tables = [make_table("vision"), make_table(LLM)]
    plan = dataclasses.replace(make_plan({"vision": 1, LLM: 1}), table_ids=tuple(t.table_id for t in tables))
    run.write_plan(plan, tables)
    run.write_shapes(random_batch(30, encoders=("vision",), seed=0))
    with SpoolWriter(config.store, run.run_id, "fit") as spool:
        for table in tables:
            spool.append(table)
    ingest(config.store)
    return run


@pytest.fixture
def store():
    return open_store("127.0.0.1", 0, is_server=True, timeout_s=20)


def scheduler(run, mode=TRAIN):
    return Scheduler(run, run.config(), run.plan(), mode, attempt=1)


def observe(store, run, step):
    """All ranks report `step`, with nothing to learn from."""
    for rank in range(run.plan().num_processes):
        wire.send_times(store, RankTimes(step, rank, 0.5, {}))


def observe_times(store, run, step, slower):
    """All ranks report `step`: what its plan is predicted to take, times a factor per module."""
    (message,) = messages(store, [step])
    batch = GlobalBatches(run.config(), run.shapes()).at(step)
    cost = make_cost("vision")
    expected_s = bucket_seconds(run.plan(), message.step_plan, batch, cost, {})
    for seat in seats(run.plan()):
        spans = expected_s.of((seat.module, seat.stage, seat.dp_rank))
        seconds = {k: sum(slower[m] * s.sum() for m, s in of.items()) for k, of in enumerate(spans) if of}
        wire.send_times(store, RankTimes(step, seat.rank, 0.5, seconds))


class Measured(Scheduler):
    """Ranks measure steps once they are planned."""

    slower: dict[str, float]

    def _listen(self, store, seen, next_step):
        observe_times(store, self.run, seen, self.slower)
        return super()._listen(store, seen, next_step)


def measured(run, slower, *args, **kwargs):
    service = Measured(run, run.config(), run.plan(), TRAIN, *args, **kwargs)
    service.run, service.slower = run, slower
    return service


def levels_of(service):
    return {found.module: found.level for found in service._learner.factors.modules}


def messages(store, steps):
    return [PlanMessage.decode(store.get(f"plan/{step}")) for step in steps]


def test_every_step_is_planned_and_recorded_as_published(run, store):
    for step in range(NUM_STEPS):
        observe(store, run, step)
    service = scheduler(run)
    service.serve(store)
    service.close(store)
    published = messages(store, range(NUM_STEPS))
    assert read_spool(run.config().store, StepPlan) == [m.step_plan for m in published]
    for step, message in enumerate(published):
        expected = [s.sample_index for s in GlobalBatches(run.config(), run.shapes()).at(step)]
        assert list(message.step_plan.sample_index) == expected
        assert message.step_plan.step == step
        assert {key[0] for key in message.predicted} == {"vision", LLM}


def test_a_step_that_rank_0_planned_itself_is_not_recorded_a_second_time(run, store):
    shapes, config = run.shapes(), run.config()
    fallback = schedule_step(
        run_id=run.run_id, step=1, plan=run.plan(), batch=GlobalBatches(config, shapes).at(1), cost=make_cost("vision"),
        policy="arrival",
    )  # fmt: skip
    assert publish(store, PlanMessage(fallback, {}))
    for step in range(NUM_STEPS):
        observe(store, run, step)
    service = scheduler(run)
    service.serve(store)
    service.close(store)
    assert messages(store, [1])[0].step_plan == fallback
    assert [p.step for p in read_spool(config.store, StepPlan)] == [0, 2, 3, 4, 5]


def newest(store):
    return max((step for step in range(NUM_STEPS) if wire.is_published(store, step)), default=-1)


@pytest.mark.parametrize("num_threads", [1, AHEAD])
def test_it_works_only_so_far_ahead(run, store, num_threads):
    found = []

    class Watched(Scheduler):
        def _listen(self, store, seen, next_step):
            if newest(store) < min(seen + AHEAD, NUM_STEPS - 1):
                return False  # still planning; a rank that is slow enough to see how far it goes
            found.append((seen, newest(store), next_step))
            observe(store, run, seen)
            return super()._listen(store, seen, next_step)

    service = Watched(run, run.config(), run.plan(), TRAIN, attempt=1)
    service._num_threads = num_threads
    service.serve(store)
    service.close(store)
    assert found == [
        (step, min(step + AHEAD, NUM_STEPS - 1), min(step + AHEAD + 1, NUM_STEPS)) for step in range(NUM_STEPS)
    ]
    assert [p.step for p in read_spool(run.config().store, StepPlan)] == list(range(NUM_STEPS))


def give_inline_plan(run):
    tables = run.cost_tables()
    ids = tuple(t.table_id for t in tables)
    run.write_plan(dataclasses.replace(make_inline_plan(2, global_batch_size=8), table_ids=ids), tables)


def test_of_stages_that_hold_several_modules_it_learns_each(run, store):
    give_inline_plan(run)
    service = measured(run, {"vision": 2.0, LLM: 1.0}, attempt=1)
    service.serve(store)
    service.close(store)
    assert levels_of(service)["vision"] > 1.5
    assert levels_of(service)[LLM] == pytest.approx(1.0, abs=0.15)


def test_it_learns_from_plans_that_rank_0_made_itself(run, store, monkeypatch):
    cost, batches = make_cost("vision"), GlobalBatches(run.config(), run.shapes())
    for step in range(NUM_STEPS):
        step_plan = schedule_step(
            run_id=run.run_id, step=step, plan=run.plan(), batch=batches.at(step), cost=cost, policy="quick"
        )
        assert publish(store, PlanMessage(step_plan, {}))
    service = measured(run, {"vision": 2.0, LLM: 2.0}, attempt=1)
    monkeypatch.setattr(wire, "first_unpublished", lambda *_: 0)
    service.serve(store)
    service.close(store)
    assert levels_of(service) == pytest.approx({"vision": 2.0, LLM: 2.0}, rel=0.05)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_plan_depends_on_nothing_but_its_inputs(run, store, num_threads):
    service = scheduler(run)
    service._num_threads = num_threads
    for step in range(NUM_STEPS):
        observe(store, run, step)
    service.serve(store)
    service.close(store)
    for message in messages(store, range(NUM_STEPS)):
        alone = schedule_step(
            run_id=run.run_id,
            step=message.step_plan.step,
            plan=run.plan(),
            batch=GlobalBatches(run.config(), run.shapes()).at(message.step_plan.step),
            cost=service._cost,
            max_concurrency=service._concurrency,
        )
        assert message.step_plan == alone


class Overtaken(Scheduler):
    """Rank 0 asks for step 2 while the scheduler plans step 1, and again for each step that was never planned."""

    def _message(self, step, *args):
        if step == 1:
            wire.note_asked(self.store, 2)
        return super()._message(step, *args)


def test_one_that_is_behind_makes_quick_plans_until_it_has_caught_up(run, store):
    service = Overtaken(run, run.config(), run.plan(), TRAIN, attempt=1)
    service.store, service._num_threads = store, 1

    listen = service._listen

    def slow_ranks(store, seen, next_step):
        if newest(store) >= min(seen + AHEAD, NUM_STEPS - 1):
            observe(store, run, seen)
        return listen(store, seen, next_step)

    service._listen = slow_ranks
    service.serve(store)
    service.close(store)
    policies = [m.step_plan.policy for m in messages(store, range(NUM_STEPS))]
    assert QUICK not in policies[:2]
    assert policies[2] == QUICK
    assert QUICK not in policies[3:], "it was ahead again after step 2"
    (event,) = read_spool(run.config().store, RunEvent)
    assert (event.kind, event.step, event.job, event.attempt) == ("scheduler_behind", 2, TRAIN, 1)


def test_while_kernels_compile_only_what_is_asked_for_is_planned_and_quickly(run, store):
    service = scheduler(run)
    service.warm_up.result()
    service.warm_up = Future()
    wire.note_asked(store, 1)
    listen = service._listen

    def ranks(store, seen, next_step):
        if not service.warm_up.done():
            assert newest(store) == 1, "step 2 is in no hurry"
            service.warm_up.set_result(None)
        if newest(store) >= min(seen + AHEAD, NUM_STEPS - 1):
            observe(store, run, seen)
        return listen(store, seen, next_step)

    service._listen = ranks
    service.serve(store)
    service.close(store)
    policies = [m.step_plan.policy for m in messages(store, range(NUM_STEPS)[1:])]
    assert policies[0] == QUICK
    assert policies[-1] != QUICK
    (event,) = read_spool(run.config().store, RunEvent)
    assert "compiled" in event.detail


def test_a_comparison_runs_what_it_says_however_late(run, store):
    service = scheduler(run, COMPARE)
    wire.note_asked(store, 0)
    for step in range(4):
        observe(store, run, step)

    make = service._message

    def hasty_rank(step, *args):
        wire.note_asked(store, step + 1)
        return make(step, *args)

    service._message = hasty_rank
    service.serve(store)
    service.close(store)
    assert [p.policy for p in read_spool(run.config().store, StepPlan)] == ["warmup", "warmup", "arrival", "balanced"]
    assert read_spool(run.config().store, RunEvent) == []


def test_a_second_start_takes_over_where_the_first_left_off(run, store):
    class Killed(Exception):
        pass

    class Dies(Scheduler):
        def _listen(self, store, seen, next_step):
            if seen == 1:
                raise Killed
            return super()._listen(store, seen, next_step)

    observe(store, run, 0)
    first = Dies(run, run.config(), run.plan(), TRAIN, attempt=1)
    with pytest.raises(Killed):
        first.serve(store)  # and no close: its plans are in memory
    left = newest(store)
    wire.note_asked(store, 2)
    second = Scheduler(run, run.config(), run.plan(), TRAIN, attempt=1, start=2)
    for step in range(left + 1, NUM_STEPS):
        observe(store, run, step)
    second.serve(store)
    second.close(store)
    assert [p.step for p in read_spool(run.config().store, StepPlan)] == list(range(left + 1, NUM_STEPS))
    assert wire.recorded_step(store, 2) == NUM_STEPS - 1
    assert read_spool(run.config().store, RunEvent) == [], "it is not behind, it has just begun"


def test_corrections_outlive_the_scheduler_that_found_them(run, store):
    first = measured(run, {"vision": 2.0, LLM: 1.0}, attempt=1)
    first.serve(store)
    first.close(store)
    rows = read_spool(run.config().store, Correction)
    assert {c.level for c in rows if c.module == "vision"} >= {wire.factors_in_force(store).by_module()["vision"].level}
    assert wire.factors_in_force(store) == first._learner.factors
    assert levels_of(first)["vision"] == pytest.approx(2.0, rel=0.1)
    second = Scheduler(run, run.config(), run.plan(), TRAIN, 1, 2, wire.learned(store))
    assert second._learner.factors == first._learner.factors


def test_what_is_published_is_told_once_it_is_on_disk(run, store, monkeypatch):
    monkeypatch.setattr(wire, "RECORD_EVERY_STEPS", 4)
    on_disk = []

    class Watched(Scheduler):
        def _record(self, store):
            super()._record(store)
            on_disk.append((wire.recorded_step(store, 1), [p.step for p in read_spool(run.config().store, StepPlan)]))

    for step in range(NUM_STEPS):
        observe(store, run, step)
    service = Watched(run, run.config(), run.plan(), TRAIN, attempt=1)
    service.serve(store)
    service.close(store)
    assert on_disk == [(3, [0, 1, 2, 3]), (5, [0, 1, 2, 3, 4, 5])]


def test_a_full_disk_ends_no_scheduler_and_loses_no_row(run, store, monkeypatch, capfd):
    monkeypatch.setattr(wire, "RECORD_EVERY_STEPS", 2)
    monkeypatch.setattr("dflop.jobs.scheduler.RETRY_AFTER_S", 0.0)
    write, refused = durable.write_new, []

    def full(path, content):
        if len(refused) < 3:
            refused.append(path)
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(durable, "write_new", full)
    for step in range(NUM_STEPS):
        observe(store, run, step)
    service = scheduler(run)
    service.serve(store)
    assert len(refused) == 3
    service.close(store)
    assert [p.step for p in read_spool(run.config().store, StepPlan)] == list(range(NUM_STEPS))
    assert wire.recorded_step(store, 1) == NUM_STEPS - 1
    said = capfd.readouterr().err
    assert (said.count("cannot be written"), said.count("written again")) == (1, 1)


def test_while_the_disk_is_full_rank_0_is_not_told_that_plans_are_on_disk(run, store, monkeypatch, capfd):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(wire, "RECORD_EVERY_STEPS", 2)
    monkeypatch.setattr(durable, "write_new", full)
    for step in range(NUM_STEPS):
        observe(store, run, step)
    service = scheduler(run)
    service.serve(store)
    service.close(store)
    assert wire.recorded_step(store, 1) < 0
    assert "are lost" in capfd.readouterr().err


def test_it_records_at_once_when_a_checkpoint_is_due(run, store):
    on_disk = []

    class Watched(Scheduler):
        def _record(self, store):
            super()._record(store)
            on_disk.append(wire.recorded_step(store, 1))

        def _listen(self, store, seen, next_step):
            if seen == 1:
                wire.note_wanted(store, seen)
            return super()._listen(store, seen, next_step)

    for step in range(NUM_STEPS):
        observe(store, run, step)
    service = Watched(run, run.config(), run.plan(), TRAIN, attempt=1)
    service.serve(store)
    assert len(on_disk) == 1
    assert 1 <= on_disk[0] < NUM_STEPS - 1, "what is published later may wait"
    assert [p.step for p in read_spool(run.config().store, StepPlan)] == list(range(on_disk[0] + 1))


def test_a_comparison_is_labelled_with_its_policies(run, store):
    service = scheduler(run, COMPARE)
    for step in range(4):
        observe(store, run, step)
    service.serve(store)
    service.close(store)
    plans = read_spool(run.config().store, StepPlan)
    assert {p.run_id for p in plans} == {f"{run.run_id}/compare"}
    assert [p.policy for p in plans] == ["warmup", "warmup", "arrival", "balanced"]
    assert plans[2].sample_index == plans[3].sample_index


def test_tables_that_are_not_in_the_store_are_named(run):
    plan = dataclasses.replace(run.plan(), table_ids=("gone",))
    with pytest.raises(StoreError, match="cost tables gone of the plan are not in the snapshot"):
        Scheduler(run, run.config(), plan, TRAIN, attempt=1)


def test_what_it_read_is_on_record_before_the_first_step(run):
    service = scheduler(run)
    service.close(store)
    with Reader(run.config().store) as reader:
        current = reader.snapshot
    (found,) = read_spool(run.config().store, RunInput)
    assert (found.run_id, found.job, found.attempt) == (run.run_id, TRAIN, 1)
    assert (found.snapshot_seq, found.snapshot_revision) == (current.seq, current.revision)
    assert found.table_ids == run.plan().table_ids
    assert found.data_profile_key == run.profile_key()
