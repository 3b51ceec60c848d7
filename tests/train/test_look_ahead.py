"""The loop with decode workers: media of later steps begin as soon as there are plans, and nothing else changes."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np

from dflop.records import LLM
from dflop.train.feed import Feed
from dflop.train.plans import PlanSource
from dflop.train.prefetch import Prefetcher
from dflop.train.stages import llm_stage_of
from dflop.train.wire import publish
from tests.train.ranks import run_ranks
from tests.train.reader import NoiseReader
from tests.train.synthetic import SyntheticSource, family, make_shapes
from tests.train.test_loop import BATCH_SIZE, SETTINGS, FixedPlans, make_trainer
from tests.train.test_wire import message

NUM_STEPS = 3


class ReaderSource(SyntheticSource):
    """Decodes in the feed thread what the workers would."""

    def __init__(self, shapes, reader):
        super().__init__(shapes)
        self.reader = reader

    def array(self, sample_index: int, item: int) -> np.ndarray:
        return self.reader(sample_index, self.shape(sample_index).items[item], 0)


class PlansAhead(FixedPlans):
    """The scheduler is always two steps ahead."""

    def published_after(self, step, num_steps):
        return [self.get(step + 1 + n).step_plan for n in range(min(num_steps, 2))]


class NotingPrefetcher(Prefetcher):
    """Notes in which order steps are begun."""

    begun: list = []

    def begin(self, step, wanted, *, if_room=False):
        self.begun.append((step, if_room))
        return super().begin(step, wanted, if_room=if_room)


def train(rank, folder, num_workers):
    shapes = make_shapes(NUM_STEPS * BATCH_SIZE, seed=4, kinds=("image",))
    shape_of = {i.grid: family().array_shape(i.module, i.grid) for s in shapes for i in s.items}
    reader = NoiseReader(shape_of, next(s.sample_index for s in shapes[BATCH_SIZE:] if s.items))
    settings = dataclasses.replace(SETTINGS, num_steps=NUM_STEPS, prefetch_steps=2)
    source, layout = ReaderSource(shapes, reader), {"vision": (1, 1), LLM: (1, 1)}
    trainer, stage, (seen, bad) = make_trainer(rank, layout, shapes, source, settings)
    prefetcher = NotingPrefetcher(reader, num_workers, timeout_s=60, max_ahead_bytes=2**30) if num_workers else None
    trainer._feed = Feed(source, family(), trainer._plan, trainer._seat, llm_stage_of([stage]), prefetcher=prefetcher)
    trainer._plans = PlansAhead(trainer._plan, shapes, None)
    trainer.run()
    threads = [t.name for t in threading.enumerate() if t.name.startswith(("decode", "feed"))]
    return [(o.loss, o.grad_norm) for o in seen], bad, list(dict.fromkeys(NotingPrefetcher.begun)), threads


def test_workers_change_no_number_and_are_gone_at_the_end(tmp_path):
    ranks, without_workers = (run_ranks(train, 2, tmp_path, num_workers) for num_workers in (1, 0))
    assert len(ranks[0][1]) == 1
    assert [(losses, bad) for losses, bad, *_ in ranks] == [(losses, bad) for losses, bad, *_ in without_workers]
    for _, _, begun, threads in ranks:
        # Plans are two steps ahead, of which the loop's setting takes one.
        assert begun == [(0, False), (1, True), (1, False), (2, True), (2, False)]
        assert threads == []


def test_plans_of_later_steps_are_taken_as_far_as_they_are_there(store):
    plans = PlanSource(store, 1, timeout_s=20)
    for step in (0, 1, 2, 4):
        publish(store, message(step))
    assert [p.step for p in plans.published_after(0, 8)] == [1, 2]
    assert [p.step for p in plans.published_after(0, 1)] == [1]
    assert plans.published_after(2, 8) == []
    assert plans.published_after(0, 8)[0] == plans.get(1).step_plan
