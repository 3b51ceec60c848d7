"""Who may train a run. Two nodes are two values of the machine's boot id; their clocks do not matter."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflop.errors import LaunchError
from dflop.run import training_claim
from dflop.run.batches import COMPARE, TRAIN
from dflop.run.directory import RunDir
from dflop.run.driver_lock import LEASE_S
from dflop.run.training_claim import TrainingClaim, num_attempts, trainer_of
from dflop.store import lease
from tests.jobs.made import make_run

ELSEWHERE = "another-boot"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path)


@pytest.fixture
def on_node(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda name: monkeypatch.setattr(lease, "_boot_id", lambda: name)


@pytest.fixture
def squeue(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what squeue answers."""

    def answer(stdout: str = "", stderr: str = "") -> None:
        done = subprocess.CompletedProcess([], int(bool(stderr)), stdout, stderr)
        monkeypatch.setattr(training_claim, "run_command", lambda _: done)

    answer(stderr="squeue: command not found")
    return answer


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], None]]]:
    """What happens in each wait of a job that wants to train, one after the other, which take time of its own clock."""
    happens: list[Callable[[], None]] = []
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds
        if happens:
            happens.pop(0)()

    monkeypatch.setattr(training_claim.time, "sleep", sleep)
    monkeypatch.setattr(training_claim.time, "monotonic", lambda: now_s[0])
    return happens


def claim_of(run: RunDir, mode: str = TRAIN) -> Path:
    return max((run.path / "claims" / mode).glob("*.json"))


def held_elsewhere(run: RunDir, on_node: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, job: str = "") -> None:
    """A claim of a job on another node, whose lock is not seen here."""
    on_node(ELSEWHERE)
    monkeypatch.setenv("SLURM_JOB_ID", job)
    claim = TrainingClaim(run, TRAIN, print)
    claim._lease._stop.set()  # its heart beats when a test says so
    claim._held.pop_all()
    lock = run.path / "claims" / TRAIN / "lock"
    lock.unlink()  # another node's lock
    monkeypatch.delenv("SLURM_JOB_ID")
    on_node("here")


def test_a_run_trains_in_one_job_at_a_time(run, squeue, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    first = TrainingClaim(run, TRAIN, print)
    assert trainer_of(run, TRAIN).job == "slurm 12"
    assert trainer_of(run, COMPARE) is None, "a comparison writes no checkpoint"
    TrainingClaim(run, COMPARE, print).release()
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    with pytest.raises(LaunchError, match="run `small-1` is being trained by job slurm 12, process") as caught:
        TrainingClaim(run, TRAIN, print)
    assert caught.value.where == str(run.path)
    first.check()
    first.release()
    assert trainer_of(run, TRAIN) is None
    second = TrainingClaim(run, TRAIN, print)
    with pytest.raises(LaunchError, match="being trained by job slurm 13"):
        first.check()
    second.release()


def test_starts_are_numbered_from_one_per_job(run, squeue):
    attempts = []
    for mode in (TRAIN, TRAIN, COMPARE, TRAIN):
        claim = TrainingClaim(run, mode, print)
        attempts.append(claim.attempt)
        claim.release()
    assert attempts == [1, 2, 1, 3]
    assert (num_attempts(RunDir(run.path), TRAIN), num_attempts(run, COMPARE)) == (3, 1)


def test_a_job_that_was_killed_holds_nothing_on_its_machine(run):
    if not (pid := os.fork()):
        TrainingClaim(run, TRAIN, print)
        os._exit(9)
    os.waitpid(pid, 0)
    assert not lease.newest_claim(claim_of(run).parent).is_released
    assert trainer_of(run, TRAIN) is None
    TrainingClaim(run, TRAIN, print).release()


@pytest.mark.parametrize("skew_s", [0, -300, 300])
def test_on_another_node_a_heartbeat_refuses_and_silence_frees_whatever_clocks_say(
    run, on_node, squeue, waits, monkeypatch, skew_s
):
    held_elsewhere(run, on_node, monkeypatch)
    claim, then = claim_of(run), time.time() + skew_s
    os.utime(claim, (then, then))
    said: list[str] = []
    waits += [lambda: None, lambda: os.utime(claim, (then + 10, then + 10))]
    with pytest.raises(LaunchError, match="is being trained by process"):
        TrainingClaim(run, TRAIN, said.append)
    assert (said[0].endswith("; waiting for a heartbeat"), waits) == (True, [])
    began_s = time.monotonic()
    taken = TrainingClaim(run, TRAIN, said.append)
    assert time.monotonic() - began_s >= LEASE_S
    taken.release()


@pytest.mark.parametrize(
    ("answer", "is_free"),
    [
        ({"stdout": "FAILED"}, True), ({"stdout": "CANCELLED"}, True), ({"stderr": "Invalid job id specified"}, True),
        ({"stdout": "RUNNING"}, False), ({"stdout": "COMPLETING"}, False), ({"stderr": "no answer within 60 s"}, False),
    ],
)  # fmt: skip
def test_slurm_may_know_that_the_job_has_ended(run, on_node, squeue, waits, monkeypatch, answer, is_free):
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "c1")
    held_elsewhere(run, on_node, monkeypatch, job="12")
    squeue(**answer)
    began_s = time.monotonic()
    TrainingClaim(run, TRAIN, print).release()
    assert (time.monotonic() - began_s < LEASE_S) == is_free
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "c2")
    held_elsewhere(run, on_node, monkeypatch, job="13")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "c1")
    began_s = time.monotonic()
    TrainingClaim(run, TRAIN, print).release()
    assert time.monotonic() - began_s >= LEASE_S, "another cluster's Slurm has another job 13"


def test_a_requeued_job_takes_its_own_claim_at_once(run, on_node, squeue, waits, monkeypatch):
    held_elsewhere(run, on_node, monkeypatch, job="12")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    waits.append(lambda: pytest.fail("waited for itself"))
    TrainingClaim(run, TRAIN, print).release()


@pytest.mark.parametrize("content", [b"", b"{half", b"[]"])
def test_a_damaged_claim_holds_nothing(run, squeue, content):
    TrainingClaim(run, TRAIN, print).release()
    claim_of(run).write_bytes(content)
    assert trainer_of(run, TRAIN) is None
    TrainingClaim(run, TRAIN, print).release()


def test_of_two_jobs_that_see_a_dead_one_only_one_takes_over(run, on_node, squeue, waits, monkeypatch):
    held_elsewhere(run, on_node, monkeypatch)
    before = claim_of(run)

    def another() -> None:
        on_node("third")
        faster = training_claim._Lease(before.parent, "", int(before.stem))
        faster.__enter__()
        faster._stop.set()
        on_node("here")

    waits += [lambda: None] * (int(LEASE_S) - 1) + [another]
    with pytest.raises(LaunchError, match="is being trained by process"):
        TrainingClaim(run, TRAIN, print)
