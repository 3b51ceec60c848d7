"""Corrections: learning by ranks, microbatches, buckets and steps of history."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from dflop.correct.buckets import bucket_edges
from dflop.correct.cusum import Cusum
from dflop.correct.drift import CostDrift
from dflop.correct.estimate import Estimator
from dflop.correct.times import StepTimes
from dflop.jobs.stalls import Stalls
from dflop.records import LLM
from dflop.schedule.attribution import bucket_seconds
from dflop.schedule.scheduler import schedule_step
from dflop.train.wire import RankTimes
from tests.bench.growth.part import Part, Work
from tests.builders import make_cost, make_plan, random_batch
from tests.jobs.test_learning import Job

NUM_BUCKETS, NUM_MICROBATCHES, NUM_RANKS = 12, 16, 8
BY_ROWS = "a row per microbatch of a rank, and a system of buckets that stays"


def times(num_ranks: int, num_microbatches: int, num_buckets: int) -> StepTimes:
    """A step of the LLM: as many microbatches on every rank, sizes mixed differently in each."""
    rng, num = np.random.default_rng(0), num_ranks * num_microbatches
    expected_s = rng.lognormal(0.0, 0.5, (num, num_buckets)) * (rng.random((num, num_buckets)) < 0.7)
    expected_s[:, 0] += 0.1
    measured_s = expected_s.sum(axis=1) * rng.lognormal(0.0, 0.05, num)
    nodes = tuple((LLM, 0, rank) for rank in range(num_ranks))
    return StepTimes(nodes, np.repeat(np.arange(num_ranks), num_microbatches), measured_s, {LLM: expected_s})


def learn(num_ranks: int, num_microbatches: int, num_buckets: int, num_steps: int = 4) -> Work:
    """Estimator and charts take in some steps, and say what should be applied."""
    seen = times(num_ranks, num_microbatches, num_buckets)
    edges = {LLM: tuple(range(100, 100 * num_buckets, 100))}

    def work() -> None:
        estimator, charts = Estimator(edges), CostDrift(edges, [(LLM,)])
        for _ in range(num_steps):
            estimator.observe(seen)
            charts.observe(seen)
            estimator.factors(shapes=True, nodes=True)

    return work


def by_ranks(size: int, _folder: Path) -> Work:
    return learn(size, NUM_MICROBATCHES, NUM_BUCKETS)


def by_microbatches(size: int, _folder: Path) -> Work:
    return learn(NUM_RANKS, size, NUM_BUCKETS)


def by_buckets(size: int, _folder: Path) -> Work:
    return learn(NUM_RANKS, 64, size, num_steps=2)


def by_steps(size: int, _folder: Path) -> Work:
    return learn(NUM_RANKS, NUM_MICROBATCHES, NUM_BUCKETS, num_steps=size)


def kept_state(size: int, _folder: Path) -> Work:
    """What a checkpoint keeps after so many steps."""
    estimator, seen = Estimator({LLM: (100,)}), times(NUM_RANKS, 4, 2)
    for _ in range(size):
        estimator.observe(seen)
    return lambda: [estimator.state() for _ in range(20)]


def whole_learner(size: int, folder: Path) -> Work:
    """What the scheduler process does beside planning: three steps of a job, whose ranks are made up before."""
    plan = make_plan({"vision": size // 4, LLM: size - size // 4}, num_microbatches=8, global_batch_size=256)
    job = Job(folder, plan, "correct.gate=on")
    batch = random_batch(256, encoders=("vision",), seed=5)
    cost = make_cost("vision")
    given = schedule_step(run_id="", step=0, plan=plan, batch=batch, cost=cost, policy="arrival")
    steps = []
    for job.step in range(1, 4):
        steps.append((job.step, replace(given, step=job.step), job.measure(given, batch)))

    def work() -> None:
        for step, step_plan, seen in steps:
            job.learner.prepare(step, step_plan, batch)
            job.learner.observe(step, seen, step + 1, 1000.0)

    return work


def shares(size: int, _folder: Path) -> Work:
    plan = make_plan({"vision": size // 4, LLM: size - size // 4}, num_microbatches=8, global_batch_size=4 * size)
    batch = random_batch(4 * size, encoders=("vision",), seed=5)
    cost = make_cost("vision")
    given = schedule_step(run_id="", step=0, plan=plan, batch=batch, cost=cost, policy="arrival")
    return lambda: bucket_seconds(plan, given, batch, cost, {LLM: (100, 300), "vision": (200,)})


def stalls(size: int, _folder: Path) -> Work:
    seen = [RankTimes(0, rank, 1.0, {0: 1.0}, 1.0 + rank % 3 / 10) for rank in range(size)]

    def work() -> None:
        found = Stalls()
        for _ in range(4):
            found.observe(seen)
            found.factors()

    return work


def charts(size: int, _folder: Path) -> Work:
    rng = np.random.default_rng(0)
    scores, signals = rng.normal(0.0, 1.0, (64, size)), np.full(size, 1.0)

    def work() -> None:
        found = Cusum(size)
        for row in scores:
            found.observe(row, signals)

    return work


def edges(size: int, _folder: Path) -> Work:
    tokens = np.random.default_rng(0).integers(1, 8000, size)
    return lambda: bucket_edges(tokens, tokens * 1e-5, np.ones(size))


PARTS = (
    Part("learning corrections by ranks", (32, 320, 3_200), by_ranks, 1.0, BY_ROWS),
    Part("learning corrections by microbatches", (16, 160, 1_600), by_microbatches, 1.0, BY_ROWS),
    Part("learning corrections by buckets", (6, 60, 600), by_buckets, 3.0, "a system of equations per step", 2.0),
    Part("learning corrections by steps", (10, 100, 1_000), by_steps, 1.0, "each step costs the same"),
    Part("state of corrections by steps of history", (10, 100, 1_000), kept_state, 0.0, "history is summed up"),
    Part("a job's learner by ranks", (32, 320, 3_200), whole_learner, 1.0, "a row per rank and microbatch"),
    Part("shares of sizes in microbatches by ranks", (32, 320, 3_200), shares, 1.0, "a cell per rank and microbatch"),
    Part("ranks that are held up by ranks", (32, 320, 3_200), stalls, 1.0, "a median per rank, one of all"),
    Part("charts of drift by series", (10, 100, 1_000), charts, 1.0, "a sum per series"),
    Part(
        "edges of buckets by items",
        (10_000, 100_000, 1_000_000),
        edges,
        1.2,
        "sorts: n log n, and what fits into caches is sorted faster per item",
    ),
)
