"""A whole job, scheduler and store included, of which one rank after the other is killed and which is started again.

Many more kills, at awkward moments, but without scheduler and store: `tests/train/test_resume.py`.
"""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from dflop.jobs.rundir import RunDir
from dflop.records import StepObservation, StepPlan
from dflop.store.spool import read_spool
from dflop.train.manifest import read_latest
from tests.jobs.training import BATCH_SIZE, LIMIT_S, NUM_SAMPLES, fork_ranks, fresh, log_of, losses_of, planned_run
from tests.launch.helpers import until

NUM_STEPS, NUM_KILLS, MOST_STEPS, NUM_RANKS = 18, 3, 5, 2

pytestmark = [pytest.mark.lane("kills"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> RunDir:
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    return planned_run(
        tmp_path_factory.mktemp("job"),
        f"train.num_steps={NUM_STEPS}",
        "train.checkpoint_every=2",
        f"train.timeout_s={4 * LIMIT_S}",
        "train.stall_s=20",
    )


def start(run: RunDir, kill: tuple[int, int] | None) -> tuple[int, ...]:
    """Exit codes of one start, in which `(rank, number of steps)` is killed behind so many steps."""
    ranks = fork_ranks(run, "dflop.jobs.train", str(run.path), "train")
    try:
        if kill is not None:
            rank, num_steps = kill
            until(lambda: num_done(run) >= num_steps, what="steps", limit_s=LIMIT_S)
            assert ranks[rank].poll() is None
            ranks[rank].kill()
        return tuple(rank.wait(LIMIT_S) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def num_done(run: RunDir) -> int:
    return len(re.findall(r"^step \d+/", log_of(run, 0).read_text(), re.MULTILINE))


def log(run: RunDir) -> str:
    return "\n".join(log_of(run, rank).read_text() for rank in range(NUM_RANKS))


def test_three_kills_change_no_loss_and_lose_no_sample(planned, tmp_path):
    straight, run = fresh(planned, tmp_path / "straight"), fresh(planned, tmp_path / "killed")
    assert start(straight, None) == (0, 0), log(straight)
    rng, firsts = random.Random(3), [0]
    kills = [(rng.randrange(NUM_RANKS), rng.randint(1, MOST_STEPS)) for _ in range(NUM_KILLS)]
    assert {rank for rank, _ in kills} == set(range(NUM_RANKS))
    for kill in kills:
        codes = start(run, kill)
        assert codes[kill[0]] == -9
        assert codes[1 - kill[0]] == 1, log(run)
        firsts.append((read_latest(run.checkpoints) or {"next_step": 0})["next_step"])
    assert firsts == sorted(firsts)
    assert 0 < firsts[-1] < NUM_STEPS
    assert start(run, None) == (0, 0), log(run)

    seen = read_spool(run.config().store, StepObservation)
    for attempt, first in enumerate(firsts, 1):
        steps = [o.step for o in seen if o.attempt == attempt]
        assert not steps or min(steps) == first
    assert sorted({(o.step, o.rank) for o in seen}) == [(s, r) for s in range(NUM_STEPS) for r in range(NUM_RANKS)]
    # Packing follows what was measured, so sums may be made in another order.
    assert losses_of(run) == pytest.approx(losses_of(straight), rel=1e-5)
    assert_every_sample_once(run)


def assert_every_sample_once(run: RunDir) -> None:
    """In each epoch, by the plans in the store; whichever start a plan is of, a step has its samples."""
    samples: dict[int, set[tuple[int, ...]]] = {}
    for plan in read_spool(run.config().store, StepPlan):
        samples.setdefault(plan.step, set()).add(tuple(sorted(plan.sample_index)))
    assert sorted(samples) == list(range(NUM_STEPS))
    assert all(len(found) == 1 for found in samples.values())
    all_of_them, per_epoch = Counter(s.sample_index for s in run.shapes()), NUM_SAMPLES // BATCH_SIZE
    for start in range(0, NUM_STEPS, per_epoch):
        steps = range(start, start + per_epoch)
        assert Counter(i for step in steps for found in samples[step] for i in found) == all_of_them
