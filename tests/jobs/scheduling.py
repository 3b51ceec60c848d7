"""A planned run and hand-made ranks for tests of the scheduler process."""

from __future__ import annotations

import dataclasses

from dflop.jobs.scheduler import Scheduler
from dflop.parallel.topology import seats
from dflop.records import LLM
from dflop.run.batches import TRAIN, GlobalBatches
from dflop.schedule.attribution import bucket_seconds
from dflop.store.ingest import ingest
from dflop.store.spool import SpoolWriter
from dflop.train import wire
from dflop.train.wire import PlanMessage, RankTimes
from tests.builders import make_cost, make_plan, make_table, random_batch
from tests.jobs.configs import make_config
from tests.jobs.made import run_of

NUM_STEPS, AHEAD = 6, 2


def planned_run(tmp_path):
    """A run with a plan, whose cost tables are in the store."""
    overrides = (f"train.num_steps={NUM_STEPS}", f"train.schedule_ahead={AHEAD}", "plan.global_batch_size=8")
    config = make_config(tmp_path, *overrides, "compare.num_batches=1", "compare.num_repeats=1")
    run = run_of(tmp_path / "runs" / "small-1", config)
    tables = [make_table("vision"), make_table(LLM)]
    run.write_plan(
        dataclasses.replace(make_plan({"vision": 1, LLM: 1}), table_ids=tuple(t.table_id for t in tables)), tables
    )
    run.write_shapes(random_batch(30, encoders=("vision",), seed=0))
    with SpoolWriter(config.store, run.run_id, "fit") as spool:
        for table in tables:
            spool.append(table)
    ingest(config.store)
    return run


def scheduler(run, mode=TRAIN):
    return Scheduler(run, run.config(), run.plan(), mode, attempt=1)


def observe(store, run, step):
    """All ranks report `step`, with nothing to learn from."""
    for rank in range(run.plan().num_processes):
        wire.send_times(store, RankTimes(step, rank, 0.5, ()))


def observe_times(store, run, batch, step, slower):
    """All ranks report `step`: what its plan is predicted to take, times a factor per module."""
    (message,) = messages(store, [step])
    expected_s = bucket_seconds(run.plan(), message.step_plan, batch, make_cost("vision"), {})
    for seat in seats(run.plan()):
        spans = expected_s.of((seat.module, seat.stage, seat.dp_rank))
        seconds = tuple((k, sum(slower[m] * s.sum() for m, s in of.items())) for k, of in enumerate(spans) if of)
        wire.send_times(store, RankTimes(step, seat.rank, 0.5, seconds))


class Measured(Scheduler):
    """Ranks measure steps once they are planned."""

    slower: dict[str, float]

    def _listen(self, store, seen, next_step):
        observe_times(store, self.run, self.batches.at(seen), seen, self.slower)
        return super()._listen(store, seen, next_step)


def measured(run, slower, *args, **kwargs):
    config = run.config()
    service = Measured(run, config, run.plan(), TRAIN, *args, **kwargs)
    service.run, service.slower, service.batches = run, slower, GlobalBatches(config, run.shapes())
    return service


def levels_of(service):
    return {found.module: found.level for found in service._learner.factors.modules}


def messages(store, steps):
    return [PlanMessage.decode(store.get(f"plan/{step}")) for step in steps]


def observe_all(store, run, num_steps=NUM_STEPS):
    """Ranks that were there before the scheduler."""
    for step in range(num_steps):
        observe(store, run, step)


def serve(service, store):
    """To the end of the job."""
    service.serve(store)
    service.close()


def before(service, name, act):
    """Act, with the arguments of the method, before each of its calls."""
    method = getattr(service, name)

    def acting(*args):
        act(*args)
        return method(*args)

    setattr(service, name, acting)
