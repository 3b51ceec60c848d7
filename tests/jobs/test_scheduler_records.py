"""What the scheduler process leaves on disk, also while the disk is full."""

from __future__ import annotations

import dataclasses
import errno

import pytest

from dflop.errors import StoreError
from dflop.jobs.scheduler import Scheduler
from dflop.records import RunInput, StepPlan
from dflop.run.batches import TRAIN
from dflop.store import durable
from dflop.store.reader import Reader
from dflop.train import wire
from tests.jobs.scheduling import NUM_STEPS, before, observe_all, scheduler, serve
from tests.jobs.training import fresh
from tests.store.spooled import read_spool


@pytest.fixture
def run(schedulable, tmp_path):
    return fresh(schedulable, tmp_path)


def note_records(service, note):
    """Note what a record leaves, after each."""
    record = service._record

    def recorded(store):
        record(store)
        note(store)

    service._record = recorded


def test_what_is_published_is_told_once_it_is_on_disk(run, store, monkeypatch):
    monkeypatch.setattr(wire, "RECORD_EVERY_STEPS", 4)
    service, on_disk = scheduler(run), []

    def note(store):
        on_disk.append((wire.recorded_step(store, 1), [p.step for p in read_spool(run.config().store, StepPlan)]))

    note_records(service, note)
    observe_all(store, run)
    serve(service, store)
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
    observe_all(store, run)
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
    observe_all(store, run)
    service = scheduler(run)
    serve(service, store)
    assert wire.recorded_step(store, 1) < 0
    assert "are lost" in capfd.readouterr().err


def test_it_records_at_once_when_a_checkpoint_is_due(run, store):
    service, on_disk = scheduler(run), []
    note_records(service, lambda store: on_disk.append(wire.recorded_step(store, 1)))
    before(service, "_listen", lambda store, seen, _: wire.note_wanted(store, seen) if seen == 1 else None)
    observe_all(store, run)
    service.serve(store)
    assert len(on_disk) == 1
    assert 1 <= on_disk[0] < NUM_STEPS - 1, "what is published later may wait"
    assert [p.step for p in read_spool(run.config().store, StepPlan)] == list(range(on_disk[0] + 1))


def test_tables_that_are_not_in_the_store_are_named(run):
    plan = dataclasses.replace(run.plan(), table_ids=("gone",))
    with pytest.raises(StoreError, match="cost tables gone of the plan are not in the snapshot"):
        Scheduler(run, run.config(), plan, TRAIN, attempt=1)


def test_what_it_read_is_on_record_before_the_first_step(run, store):
    service = scheduler(run)
    service.close(store)
    with Reader(run.config().store) as reader:
        current = reader.snapshot
    (found,) = read_spool(run.config().store, RunInput)
    assert (found.run_id, found.job, found.attempt) == (run.run_id, TRAIN, 1)
    assert (found.snapshot_seq, found.snapshot_revision) == (current.seq, current.revision)
    assert found.table_ids == run.plan().table_ids
    assert found.data_profile_key == run.profile_key()
