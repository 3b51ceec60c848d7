"""Whole jobs, two ranks of which one fails: all end soon, and say why; what was told to stop goes on later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflop.errors import Interrupted
from dflop.jobs import submit
from dflop.jobs.rundir import RunDir
from dflop.jobs.steps import TRAIN
from dflop.launch import Journal, adopt_or_submit, log_paths, run_job
from dflop.records import LLM, QuarantinedSample, RunEvent
from dflop.store.spool import read_spool
from dflop.train.manifest import read_latest
from tests.jobs.faulty import MICROBATCH, STEP
from tests.jobs.training import LIMIT_S, ROOT, fork_ranks, fresh, log_of, losses_of, planned_run, run_ranks
from tests.launch.helpers import until

NUM_STEPS, CHECKPOINT_EVERY = 7, 3
VISION_RANK, LLM_RANK = 0, 1
NAMES = {VISION_RANK: "rank 0 (vision stage 0 replica 0)", LLM_RANK: f"rank 1 ({LLM} stage 0 replica 0)"}

pytestmark = [pytest.mark.lane("jobs"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> RunDir:
    """Its messages may take longer than any test does, so that no test passes by waiting for a timeout."""
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    return planned_run(
        tmp_path_factory.mktemp("job"),
        f"train.num_steps={NUM_STEPS}",
        f"train.checkpoint_every={CHECKPOINT_EVERY}",
        f"train.timeout_s={4 * LIMIT_S}",
        "train.stall_s=20",
    )


@pytest.fixture
def run(planned, tmp_path) -> RunDir:
    return fresh(planned, tmp_path)


def end(run: RunDir, fault: str, faulty: int, *, survivors: tuple[int, ...] = (0, 1)) -> dict[int, tuple[int, str]]:
    """Exit code and output of the ranks that can end by themselves."""
    ranks = fork_ranks(run, "tests.jobs.faulty", fault, str(faulty), str(run.path))
    try:
        return {rank: (ranks[rank].wait(LIMIT_S), log_of(run, rank).read_text()) for rank in survivors}
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize("faulty", [VISION_RANK, LLM_RANK])
def test_a_rank_that_raises_is_named_by_all(run, faulty):
    ended = end(run, "raises", faulty)
    where = f"{NAMES[faulty]}, forward of microbatch {MICROBATCH}"
    code, own = ended.pop(faulty)
    assert code == 1
    assert "ValueError: it went wrong" in own
    assert where in own
    ((code, others),) = ended.values()
    assert code == 1
    assert f"the job ends: {NAMES[faulty]} failed in step {STEP + 1}, forward of microbatch {MICROBATCH}" in others
    assert "ValueError: it went wrong" in others
    assert where in others


def test_a_killed_rank_is_missed(run):
    ((code, output),) = end(run, "killed", LLM_RANK, survivors=(VISION_RANK,)).values()
    assert code == 1
    assert f"the job ends: {NAMES[LLM_RANK]} gives no sign of life" in output


def test_the_others_end_when_the_rank_that_serves_them_is_killed(run):
    ((code, output),) = end(run, "killed", VISION_RANK, survivors=(LLM_RANK,)).values()
    assert code == 1
    assert f"the job ends: {NAMES[VISION_RANK]}, which serves the job's key-value store, has gone" in output


@pytest.mark.parametrize(
    ("faulty", "why"),
    [(LLM_RANK, " gives no sign of life"), (VISION_RANK, ", which serves the job's key-value store, does not answer")],
)
def test_a_stopped_rank_is_missed(run, faulty, why):
    ((code, output),) = end(run, "stopped", faulty, survivors=(1 - faulty,)).values()
    assert code == 1
    assert f"the job ends: {NAMES[faulty]}{why}" in output


def test_a_stuck_rank_is_named_with_what_it_is_at(run):
    ended = end(run, "stuck", LLM_RANK)
    for code, output in ended.values():
        assert code == 1
        assert f"{NAMES[LLM_RANK]} is stuck: step {STEP + 1}, forward of microbatch {MICROBATCH}" in output


def test_a_file_that_cannot_be_read_to_the_end_is_named(run):
    for code, output in end(run, "unread", VISION_RANK).values():
        assert code == 1
        assert f"the job ends: {NAMES[VISION_RANK]} is stuck: step " in output
        assert ", media " in output


@pytest.fixture(scope="module")
def straight(planned, tmp_path_factory) -> dict[int, float]:
    """Losses of a job that nothing happens to."""
    run = fresh(planned, tmp_path_factory.mktemp("straight"))
    ended = run_ranks(run, "dflop.jobs.train", str(run.path), "train")
    assert ended.codes == (0, 0), "\n".join(ended.stderr)
    return losses_of(run)


def test_a_rank_that_is_told_to_stop_stops_all_behind_the_step_and_they_go_on_later(run, straight):
    for code, output in end(run, "told", LLM_RANK).values():
        assert code == Interrupted.exit_code, output
    assert read_latest(run.checkpoints)["next_step"] == STEP + 1
    assert sorted(losses_of(run)) == list(range(STEP + 1))
    ended = run_ranks(run, "dflop.jobs.train", str(run.path), "train")
    assert ended.codes == (0, 0), "\n".join(ended.stderr)
    assert f"step {STEP + 2}/{NUM_STEPS}" in ended.stderr[0]
    assert f"step {STEP + 1}/{NUM_STEPS}" not in ended.stderr[0]
    assert losses_of(run) == pytest.approx(straight, rel=1e-5)


def test_a_job_that_is_told_to_stop_before_it_begins_leaves_nothing(run):
    for code, output in end(run, "early", LLM_RANK).values():
        assert code == Interrupted.exit_code, output
    assert read_latest(run.checkpoints) is None
    assert losses_of(run) == {}


def test_a_file_that_has_gone_since_the_profile_costs_its_sample_only(run, straight):
    first = next(s for s in run.shapes() if s.items)
    image = next(Path(run.config().dataset.media_root).glob(f"**/{Path(first.items[0].path).name}"))
    hidden = image.with_suffix(".hidden")
    image.rename(hidden)
    try:
        ended = run_ranks(run, "dflop.jobs.train", str(run.path), "train")
    finally:
        hidden.rename(image)
    assert ended.codes == (0, 0), "\n".join(ended.stderr)
    found = {(q.sample_index, q.phase) for q in read_spool(run.config().store, QuarantinedSample)}
    missing = {s.sample_index for s in run.shapes() if any(i.path == first.items[0].path for i in s.items)}
    assert found == {(index, "train") for index in missing}
    assert len(losses_of(run)) == NUM_STEPS
    assert losses_of(run) != straight


def test_a_full_disk_costs_one_checkpoint(run, straight):
    for code, output in end(run, "full", LLM_RANK).values():
        assert code == 0, output
        assert "cannot write checkpoint" in output
        assert "No space left on device" in output
    assert losses_of(run) == pytest.approx(straight, rel=1e-5)
    assert read_latest(run.checkpoints)["next_step"] == NUM_STEPS
    (event,) = [e for e in read_spool(run.config().store, RunEvent) if e.kind == "checkpoint_failed"]
    assert "No space left on device" in event.detail
    names = {p.name for p in run.checkpoints.glob("step-*")}
    assert f"step-{CHECKPOINT_EVERY:08d}" not in names


def test_a_launched_job_that_is_warned_was_interrupted_and_its_next_start_goes_on(run, straight):
    """SIGUSR2 is submitit's, too: its own handler would end rank 0 without a checkpoint."""
    config, journal = run.config(), Journal(run.path, run.run_id)
    launcher, spec = submit.launcher_of(run, config), submit.train_job(run, config, TRAIN, 2)
    handle = adopt_or_submit(launcher, spec, journal)
    log = log_paths(handle, VISION_RANK).stderr
    until(lambda: log.exists() and "step 1/" in log.read_text(), what="the first step", limit_s=LIMIT_S)
    os.kill(int(handle.path(f"{VISION_RANK}.pid").read_text().split()[0]), signal.SIGUSR2)
    with pytest.raises(Interrupted, match="was told to stop"):
        run_job(launcher, spec, journal)
    first = read_latest(run.checkpoints)["next_step"]
    assert 0 < first < NUM_STEPS
    assert run_job(launcher, spec, journal) == [{"first_step": first, "num_steps": NUM_STEPS}] * 2
    assert losses_of(run) == pytest.approx(straight, rel=1e-5)


def test_torchrun_starts_a_job_and_stops_it(run, straight):
    """What it is started with by hand; the agent hands SIGTERM on to its workers."""
    log = run.path / "torchrun.log"
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "dflop.jobs.train"]

    def start() -> subprocess.Popen[bytes]:
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with log.open("w") as out:
            return subprocess.Popen(
                [sys.executable, "-m", *command, str(run.path), "train"], env=env, stdout=out, stderr=out
            )

    agent = start()
    try:
        until(lambda: "step 1/" in log.read_text(), what="the first step", limit_s=LIMIT_S)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(LIMIT_S) != 0
        latest = read_latest(run.checkpoints)
        assert latest is not None, log.read_text()
        assert "started again, the job goes on" in log.read_text()
        agent = start()
        assert agent.wait(LIMIT_S) == 0, log.read_text()
    finally:
        agent.kill()
    assert losses_of(run) == pytest.approx(straight, rel=1e-5)
