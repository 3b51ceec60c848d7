"""Whole jobs, two ranks of which one fails: all end soon, and say why; what was told to stop goes on later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflop.errors import Interrupted
from dflop.launch import Journal, adopt_or_submit_all, log_paths
from dflop.records import LLM, RunEvent
from dflop.run.batches import TRAIN
from dflop.run.directory import RunDir
from dflop.run.queue import launcher_of
from dflop.steps import submit
from dflop.train.manifest import read_latest
from tests.jobs.accidents import MICROBATCH, STEP
from tests.jobs.training import LIMIT_S, ROOT, fork_ranks, fresh, log_of, losses_of, run_ranks, set_config, train
from tests.launch.helpers import run_job, until
from tests.store.spooled import read_spool

NUM_STEPS, CHECKPOINT_EVERY = 7, 3
VISION_RANK, LLM_RANK = 0, 1
NAMES = {VISION_RANK: "rank 0 (vision stage 0 replica 0)", LLM_RANK: f"rank 1 ({LLM} stage 0 replica 0)"}
FORWARD = f", forward of microbatch {MICROBATCH}"

pytestmark = [pytest.mark.lane("jobs"), pytest.mark.timeout(400)]


@pytest.fixture
def run(planned, tmp_path) -> RunDir:
    return undisturbed(planned, tmp_path)


def undisturbed(planned: RunDir, folder: Path) -> RunDir:
    """Its messages may take longer than any test does, so that no test passes by waiting for a timeout."""
    run = fresh(planned, folder)
    set_config(
        run, f"train.num_steps={NUM_STEPS}", f"train.checkpoint_every={CHECKPOINT_EVERY}",
        f"train.timeout_s={4 * LIMIT_S}", "train.stall_s=20",
    )  # fmt: skip
    return run


def end(run: RunDir, accident: str, faulty: int, *, code: int = 1, survivors: tuple[int, ...] = (0, 1)) -> list[str]:
    """Output of the ranks that can end by themselves, once they have, all with the same code."""
    ranks = fork_ranks(run, "tests.jobs.accidents", accident, str(faulty), str(run.path))
    try:
        codes = [ranks[rank].wait(LIMIT_S) for rank in survivors]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    outputs = [log_of(run, rank).read_text() for rank in survivors]
    assert set(codes) == {code}, "\n".join(outputs)
    return outputs


@pytest.mark.parametrize("faulty", [VISION_RANK, LLM_RANK])
def test_a_rank_that_raises_is_named_by_all(run, faulty):
    outputs = end(run, "raises", faulty)
    for output in outputs:
        assert "ValueError: it went wrong" in output
        assert f"{NAMES[faulty]}{FORWARD}" in output
    assert f"the job ends: {NAMES[faulty]} failed in step {STEP}{FORWARD}" in outputs[1 - faulty]


@pytest.mark.parametrize(
    ("accident", "faulty", "why"),
    [
        ("killed", LLM_RANK, " sent no heartbeat"),
        ("killed", VISION_RANK, ", which hosts the job's key-value store, exited"),
        ("stopped", LLM_RANK, " sent no heartbeat"),
        ("stopped", VISION_RANK, ", which hosts the job's key-value store, has not responded"),
    ],
)
def test_a_rank_that_is_killed_or_stopped_is_missed(run, accident, faulty, why):
    (output,) = end(run, accident, faulty, survivors=(1 - faulty,))
    assert f"the job ends: {NAMES[faulty]}{why}" in output


@pytest.mark.parametrize(
    ("accident", "faulty", "words"),
    [
        ("stuck", LLM_RANK, [f"{NAMES[LLM_RANK]} is stuck: step {STEP}{FORWARD}"]),
        ("unread", VISION_RANK, [f"the job ends: {NAMES[VISION_RANK]} is stuck: step ", ", media "]),
    ],
)
def test_a_stuck_rank_is_named_with_what_it_is_at(run, accident, faulty, words):
    for output in end(run, accident, faulty):
        assert all(text in output for text in words)


def test_a_job_that_is_told_to_stop_before_it_begins_leaves_nothing(run):
    end(run, "early", LLM_RANK, code=Interrupted.exit_code)
    assert read_latest(run.checkpoints) is None
    assert losses_of(run) == {}


@pytest.fixture(scope="module")
def straight(planned, tmp_path_factory) -> dict[int, float]:
    """Losses of a job that nothing happens to."""
    run = undisturbed(planned, tmp_path_factory.mktemp("straight"))
    train(run)
    return losses_of(run)


def test_a_full_disk_costs_one_checkpoint(run, straight):
    for output in end(run, "full", LLM_RANK, code=0):
        assert "cannot write checkpoint" in output
        assert "No space left on device" in output
    assert losses_of(run) == pytest.approx(straight, rel=1e-5)
    assert read_latest(run.checkpoints)["next_step"] == NUM_STEPS
    (event,) = [e for e in read_spool(run.config().store, RunEvent) if e.kind == "checkpoint_failed"]
    assert "No space left on device" in event.detail
    assert f"step-{CHECKPOINT_EVERY:08d}" not in {p.name for p in run.checkpoints.glob("step-*")}


def test_weights_that_diverge_end_the_job_with_an_event_per_step(run):
    set_config(run, "train.learning_rate=1e30", "train.warmup_steps=0")
    ended = run_ranks(run, "dflop.jobs.train", str(run.path), TRAIN)
    assert ended.codes == (1, 1)
    found = [e for e in read_spool(run.config().store, RunEvent) if e.kind == "not_finite"]
    assert [e.step for e in sorted(found, key=lambda e: e.step)] == [1, 2, 3], "once per step, not per rank"
    for event in found:
        assert event.detail.startswith("loss nan, gradient norm nan; no update; ")
        assert f"step {event.step}: not finite: {event.detail}" in ended.stderr[0]
    assert all("not finite in 3 steps in a row (1, 2, 3)" in output for output in ended.stderr)
    assert read_latest(run.checkpoints) is None


def test_a_launched_job_that_is_warned_was_interrupted_and_its_next_start_goes_on(run, straight):
    """SIGUSR2 is submitit's, too: its own handler would end rank 0 without a checkpoint."""
    config, journal = run.config(), Journal(run.path, run.run_id)
    launcher, spec = launcher_of(run, config), submit.train_job(run, config, TRAIN, 2)
    (handle,) = adopt_or_submit_all(launcher, [spec], journal)
    log = log_paths(handle, VISION_RANK).stderr
    until(lambda: log.exists() and "step 0 " in log.read_text(), what="the first step", limit_s=LIMIT_S)
    os.kill(int(handle.path(f"{VISION_RANK}.pid").read_text().split()[0]), signal.SIGUSR2)
    with pytest.raises(Interrupted, match="was stopped"):
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
        until(lambda: "step 0 " in log.read_text(), what="the first step", limit_s=LIMIT_S)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(LIMIT_S) != 0
        assert read_latest(run.checkpoints) is not None, log.read_text()
        assert "started again, the job resumes from there" in log.read_text()
        agent = start()
        assert agent.wait(LIMIT_S) == 0, log.read_text()
    finally:
        agent.kill()
    assert losses_of(run) == pytest.approx(straight, rel=1e-5)
