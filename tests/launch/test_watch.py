from __future__ import annotations

import subprocess
from collections.abc import Sequence

import pytest

from dflop.launch import JobState
from dflop.launch.watch import STATES, SlurmWatcher


class FakeSlurm:
    """Answers the three clients from tables, and counts the calls."""

    def __init__(self) -> None:
        self.queue: dict[str, str] = {}
        self.accounting: dict[str, str] | None = None
        self.controller: dict[str, str] = {}
        self.is_down = False
        self.calls: list[str] = []
        self.now_s = 0.0

    def __call__(self, args: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.calls.append(args[0])
        code, out, err = getattr(self, f"_{args[0]}")(args[-1].split(","))
        return subprocess.CompletedProcess(args, code, out, err)

    def _squeue(self, ids: list[str]) -> tuple[int, str, str]:
        if self.is_down:
            return 1, "", "slurm_load_jobs error: Unable to contact slurm controller"
        lines = [f"{i}|{self.queue[i]}" for i in ids if i in self.queue]
        return (0, "\n".join(lines), "") if lines else (1, "", "slurm_load_jobs error: Invalid job id specified")

    def _sacct(self, ids: list[str]) -> tuple[int, str, str]:
        if self.accounting is None:
            return 1, "", "Slurm accounting storage is disabled"
        return 0, "\n".join(f"{i}|{self.accounting[i]}" for i in ids if i in self.accounting), ""

    def _scontrol(self, ids: list[str]) -> tuple[int, str, str]:
        known = self.controller.get(ids[0])
        return (0, f"JobId={ids[0]} {known} ExitCode=1:0", "") if known else (1, "", "Invalid job id specified")


@pytest.fixture
def slurm() -> FakeSlurm:
    return FakeSlurm()


@pytest.fixture
def watcher(slurm: FakeSlurm) -> SlurmWatcher:
    return SlurmWatcher(poll_interval_s=30, lost_after_s=100, command=slurm, clock=lambda: slurm.now_s)


def test_one_call_serves_all_jobs_and_is_not_repeated_within_the_interval(
    slurm: FakeSlurm, watcher: SlurmWatcher
) -> None:
    for job_id in "12":
        watcher.submitted(job_id)
    slurm.queue = {"1": "RUNNING|None", "2": "PENDING|Resources"}
    for _ in range(5):
        assert watcher.status("1") == (JobState.RUNNING, "")
        assert watcher.status("2") == (JobState.QUEUED, "Resources")
    assert slurm.calls == ["squeue"]
    slurm.now_s = 30
    slurm.queue["2"] = "OUT_OF_MEMORY|OutOfMemory"
    assert watcher.status("2") == (JobState.OOM, "OutOfMemory")
    assert slurm.calls == ["squeue"] * 2


def test_ended_jobs_are_not_asked_for_again(slurm: FakeSlurm, watcher: SlurmWatcher) -> None:
    slurm.queue = {"1": "COMPLETED|None"}
    assert watcher.status("1").state is JobState.DONE
    slurm.queue, slurm.now_s = {}, 1000
    assert watcher.status("1").state is JobState.DONE
    assert slurm.calls == ["squeue"]


def test_sacct_is_asked_when_squeue_has_forgotten(slurm: FakeSlurm, watcher: SlurmWatcher) -> None:
    slurm.accounting = {"7": "CANCELLED by 1000|None"}
    assert watcher.status("7") == (JobState.CANCELLED, "")
    assert slurm.calls == ["squeue", "sacct"]


def test_scontrol_is_asked_where_sacct_does_not_work_and_sacct_is_left_alone(
    slurm: FakeSlurm, watcher: SlurmWatcher
) -> None:
    slurm.controller = {"7": "JobState=NODE_FAIL Reason=None", "8": "JobState=FAILED Reason=NonZeroExitCode"}
    assert watcher.status("7").state is JobState.NODE_FAIL
    assert watcher.status("8") == (JobState.FAILED, "NonZeroExitCode")
    assert slurm.calls == ["squeue", "sacct", "scontrol", "squeue", "scontrol"]


def test_a_job_nobody_knows_is_lost_after_a_grace_only(slurm: FakeSlurm, watcher: SlurmWatcher) -> None:
    slurm.queue = {"1": "RUNNING|None"}
    assert watcher.status("1").state is JobState.RUNNING
    slurm.queue = {}
    for slurm.now_s in (30, 60, 120):
        assert watcher.status("1").state is JobState.RUNNING
    slurm.now_s = 150
    assert watcher.status("1").state is JobState.LOST


def test_a_job_that_comes_back_gets_a_new_grace(slurm: FakeSlurm, watcher: SlurmWatcher) -> None:
    assert watcher.status("1").state is JobState.QUEUED
    slurm.now_s, slurm.queue = 90, {"1": "RUNNING|None"}
    assert watcher.status("1").state is JobState.RUNNING
    slurm.now_s, slurm.queue = 120, {}
    assert watcher.status("1").state is JobState.RUNNING
    slurm.now_s = 200
    assert watcher.status("1").state is JobState.RUNNING


def test_a_controller_that_is_down_loses_nobody(slurm: FakeSlurm, watcher: SlurmWatcher) -> None:
    slurm.queue = {"1": "RUNNING|None"}
    watcher.status("1")
    slurm.is_down = True
    for slurm.now_s in (50, 500, 5000):
        status = watcher.status("1")
        assert status.state is JobState.RUNNING
        assert "Unable to contact slurm controller" in status.reason


def test_a_state_of_a_newer_slurm_counts_as_alive(slurm: FakeSlurm, watcher: SlurmWatcher) -> None:
    slurm.queue = {"1": "LEVITATING|None"}
    assert watcher.status("1") == (JobState.RUNNING, "Slurm state LEVITATING")
    assert "LEVITATING" not in STATES
