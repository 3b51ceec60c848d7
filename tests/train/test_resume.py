"""Kills cost time and nothing else: the losses are those of an undisturbed run, and every sample is trained once.

Whole jobs (launcher, store, scheduler) are killed in `tests/test_pipeline.py` and `tests/jobs/`; here only ranks are,
at awkward moments; many times in a lane.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import pytest

from dflop.records import LLM, Plan
from tests.train.campaign import STEP, WRITES, Job, Kill, counted, records, start_until_killed
from tests.train.synthetic import ALL, make_inline_plan, make_plan, sharing, sharing_optimizer

NUM_KILLS, NUM_WRITE_KILLS, MOST_STEPS = 10, 4, 3
SAME_PLAN, CONTEXT, OTHER_PLAN = 1e-6, 1e-5, 1e-4
NUM_SAMPLES, BATCH_SIZE = 14, 6

pytestmark = pytest.mark.timeout(900)


def split_plan() -> Plan:
    """vision | two replicas of the LLM, which share out the optimizer."""
    return sharing_optimizer(make_plan({"vision": (1, 1), LLM: (1, 2)}, num_microbatches=3), LLM)


def inline_plan() -> Plan:
    """Two stages; the second holds half of the encoder and the LLM."""
    return make_inline_plan([{"vision": 2, LLM: 1}, {LLM: 3}], dp=1, num_microbatches=2)


def sharded_plan() -> Plan:
    """All layers on each of three replicas, which share out the parameters."""
    return sharing(make_inline_plan([{"vision": 2, LLM: 4}], dp=3, num_microbatches=2), ALL)


def context_plan(cp: int) -> Plan:
    """Two stages, of each of which so many ranks share the samples and the optimizer."""
    stages = [{"vision": 2, LLM: 1}, {LLM: 3}]
    return sharing_optimizer(make_inline_plan(stages, dp=1, cp=cp, num_microbatches=2), "vision", LLM)


def draw_kills(seed: int, num_ranks: int) -> list[Kill]:
    """Ranks and steps at random; some kills fall into the writing of a checkpoint, at each of its moments once."""
    rng = random.Random(seed)
    writes = [Kill(0 if m == "rename" else rng.randrange(num_ranks), m, rng.randint(1, 2)) for m in WRITES]
    steps = [
        Kill(rng.randrange(num_ranks), STEP, rng.randint(0, MOST_STEPS)) for _ in range(NUM_KILLS - len(writes))
    ]  # fmt: skip
    kills = [*writes, *steps]
    rng.shuffle(kills)
    return kills


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Records of runs of so many steps under the split plan to their end."""

    @cache
    def run(num_steps):
        job = make_job(tmp_path_factory.mktemp("undisturbed"), num_steps)
        start_until_killed(job, split_plan(), 1, None)
        return records(job)

    return run


def make_job(folder, num_steps):
    return Job(folder, num_steps, NUM_SAMPLES, BATCH_SIZE)


def assert_nothing_lost_or_repeated(job, found):
    """Attempts begin at or before what is missing, and the steps that count train every epoch's samples once."""
    reached = 0
    for attempt in sorted({r.attempt for r in found}):
        steps = [r.step for r in found if r.attempt == attempt]
        assert steps == list(range(steps[0], steps[-1] + 1))
        assert steps[0] <= reached
        reached = steps[-1] + 1
    steps = list(counted(found))
    assert [r.step for r in steps] == list(range(job.num_steps))
    per_epoch = job.order.steps_per_epoch
    for start in range(0, job.num_steps, per_epoch):
        trained = Counter(i for r in steps[start : start + per_epoch] for i in r.samples)
        assert trained == Counter(range(job.num_samples))


def assert_same_curve(found, expected, tolerance):
    """Also of steps that were made again."""
    by_step = {r.step: r for r in expected}
    for r in found:
        assert r.loss == pytest.approx(by_step[r.step].loss, rel=tolerance), f"attempt {r.attempt}, step {r.step}"
        assert r.grad_norm == pytest.approx(by_step[r.step].grad_norm, rel=100 * tolerance)


def test_a_killed_job_goes_on_under_other_plans_and_shardings_and_back(tmp_path, undisturbed):
    job = make_job(tmp_path, num_steps=6)
    start_until_killed(job, split_plan(), 1, Kill(2, STEP, 3))
    assert start_until_killed(job, inline_plan(), 2, Kill(0, "files written", 1)), "a folder in the making"
    start_until_killed(job, sharded_plan(), 3, Kill(1, STEP, 3))
    start_until_killed(job, split_plan(), 4, None)
    found = records(job)
    assert {r.attempt for r in found} == {1, 2, 3, 4}
    assert len(found) > job.num_steps, "no kill cost a step"
    assert_nothing_lost_or_repeated(job, found)
    assert_same_curve(found, undisturbed(6), OTHER_PLAN)


def test_a_job_goes_on_under_another_context_parallel_degree_and_back(tmp_path, undisturbed):
    job = make_job(tmp_path, num_steps=6)
    start_until_killed(job, context_plan(2), 1, Kill(1, STEP, 3))
    start_until_killed(job, context_plan(1), 2, Kill(0, STEP, 2))
    start_until_killed(job, context_plan(2), 3, None)
    found = records(job)
    assert {r.attempt for r in found} == {1, 2, 3}
    assert_nothing_lost_or_repeated(job, found)
    assert_same_curve(found, undisturbed(6), CONTEXT)


@pytest.mark.lane("kills")
def test_ten_kills_change_no_loss_and_lose_no_sample(tmp_path, undisturbed):
    job, plan = make_job(tmp_path, num_steps=39), split_plan()
    kills = draw_kills(0, plan.num_processes)
    assert len(kills) == NUM_KILLS
    assert {k.rank for k in kills} == set(range(plan.num_processes))
    for attempt, kill in enumerate(kills, 1):
        half_written = start_until_killed(job, plan, attempt, kill)
        # The moment was what it is called: without a name there is a folder in the making.
        assert half_written or kill.moment == STEP, kill
    start_until_killed(job, plan, NUM_KILLS + 1, None)
    found = records(job)
    assert_nothing_lost_or_repeated(job, found)
    assert_same_curve(found, undisturbed(39), SAME_PLAN)
    losses = [r.loss for r in counted(found)]
    assert losses[-1] < losses[0]
    assert len(found) > job.num_steps, "no kill cost a step: none came before a checkpoint was due"
