"""The scheduler process against a key-value store, with hand-made ranks."""

from __future__ import annotations

import dataclasses

import pytest

from dflop.config import dump_config
from dflop.errors import StoreError
from dflop.jobs.rundir import RunDir
from dflop.jobs.scheduler import Scheduler
from dflop.jobs.steps import COMPARE, TRAIN, GlobalBatches
from dflop.records import LLM, RunInput, StepObservation, StepPlan, to_dict
from dflop.schedule.scheduler import schedule_step
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.spool import SpoolWriter, read_spool
from dflop.train.plans import PlanMessage, open_store, publish, send_observation
from tests.builders import make_cost, make_plan, make_table, random_batch
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
    """Both ranks report `step`."""
    for rank, module in enumerate(("vision", LLM)):
        seen = StepObservation(
            run.run_id,
            1,
            step,
            "balanced",
            rank,
            module,
            0,
            0,
            0.5,
            0.5,
            0.4,
            0.0,
            0.0,
            0.0,
            0.0,
            2.0,
            1.0,
            80,
            1.0,
            (),
        )
        send_observation(store, step, rank, to_dict(seen))


def messages(store, steps):
    return [PlanMessage.decode(store.get(f"plan/{step}")) for step in steps]


def test_every_step_is_planned_and_recorded_as_published(run, store):
    for step in range(NUM_STEPS):
        observe(store, run, step)
    service = scheduler(run)
    service.serve(store)
    service.close()
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
    service.close()
    assert messages(store, [1])[0].step_plan == fallback
    assert [p.step for p in read_spool(config.store, StepPlan)] == [0, 2, 3, 4, 5]


def test_it_works_only_so_far_ahead(run, store):
    waits = []

    class Watched(Scheduler):
        def _listen(self, store, seen, pending):
            newest = max(step for step in range(NUM_STEPS) if store.check([f"plan/{step}"]))
            waits.append((seen, newest))
            observe(store, run, seen)
            return super()._listen(store, seen, pending)

    Watched(run, run.config(), run.plan(), TRAIN, attempt=1).serve(store)
    assert waits == [(step, min(step + AHEAD, NUM_STEPS - 1)) for step in range(NUM_STEPS)]


def test_a_comparison_is_labelled_with_its_policies(run, store):
    service = scheduler(run, COMPARE)
    for step in range(4):
        observe(store, run, step)
    service.serve(store)
    service.close()
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
    service.close()
    with Reader(run.config().store) as reader:
        current = reader.snapshot
    (found,) = read_spool(run.config().store, RunInput)
    assert (found.run_id, found.job, found.attempt) == (run.run_id, TRAIN, 1)
    assert (found.snapshot_seq, found.snapshot_revision) == (current.seq, current.revision)
    assert found.table_ids == run.plan().table_ids
    assert found.data_profile_key == run.profile_key()
