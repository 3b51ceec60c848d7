import asyncio
import dataclasses
from pathlib import Path

import pytest

from dflop.errors import LaunchError
from dflop.launch import JobHandle, JobSpec, JobState, JobStatus, Launcher
from dflop.launch.local import LocalLauncher
from dflop.run import driver_lock
from dflop.run.directory import RunDir
from dflop.run.messages import Say
from dflop.steps import follow
from dflop.steps.follow import Listener, Meanwhile, _Announcer, follow_jobs
from dflop.store.lease import Claim
from tests.launch.helpers import make_spec


@pytest.fixture
def launcher() -> Launcher:
    return LocalLauncher(cancel_grace_s=0.5)


@pytest.fixture
def job(tmp_path: Path) -> JobSpec:
    """Ends when there is a file `gate`."""
    return make_spec(tmp_path / "job", "wait_for", str(tmp_path / "gate"))


def followed(run: RunDir, launcher: Launcher, job: JobSpec, say: Say, meanwhile: Meanwhile) -> list[list[str]]:
    return asyncio.run(follow_jobs(run, launcher, [job], Listener(say), meanwhile=meanwhile, every_s=0.01))


def test_rounds_follow_each_other_and_an_error_in_one_ends_nothing(run, launcher, job, tmp_path):
    rounds: list[JobHandle] = []
    lines: list[str] = []

    async def meanwhile(handle: JobHandle) -> None:
        rounds.append(handle)
        number = len(rounds)
        if number in (2, 3):
            raise OSError(28, "No space left on device", tmp_path / f".tmp-{number}")
        if number == 6:
            (tmp_path / "gate").touch()
        if number > 4:
            raise ZeroDivisionError("a fault of ours")

    assert followed(run, launcher, job, lines.append, meanwhile) == [["seen"]]
    assert len(rounds) >= 6
    assert {handle.key for handle in rounds} == {job.key}
    beside = [line for line in lines if line.startswith("side task of the job")]
    assert ["No space left" in line for line in beside] == [True, False, False], "each is said once"
    assert beside[1].endswith("works again")
    assert "ZeroDivisionError" in beside[2]


def test_a_round_is_not_cut_off_by_the_end_of_the_job(run, launcher, job, tmp_path):
    """A decision may be in the midst of being written."""
    log: list[str] = []

    async def meanwhile(handle: JobHandle) -> None:
        log.append("begins")
        (tmp_path / "gate").touch()
        while not launcher.poll(handle).state.is_final:
            await asyncio.sleep(0.01)
        log.append("ends")

    followed(run, launcher, job, log.append, meanwhile)
    assert log.count("begins") == log.count("ends") > 0


def test_a_cancelled_waiter_cancels_rounds_and_job(run, launcher, job):
    cancelled = []

    async def main() -> None:
        began = asyncio.Event()

        async def meanwhile(handle: JobHandle) -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(handle)
                raise

        following = asyncio.create_task(
            follow_jobs(run, launcher, [job], Listener(str), meanwhile=meanwhile, every_s=0.01)
        )
        await began.wait()
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert launcher.poll(cancelled[0]).state is JobState.CANCELLED


class Hearer(Listener):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines, self.bar = list[str](), list[tuple[float, str]]()
        super().__init__(self.lines.append)

    def progress(self, percent: float, text: str) -> None:
        self.bar.append((round(percent, 1), text))


def test_how_a_job_stands_is_told_with_its_steps(run, job):
    hearer, clock = Hearer(), [0.0]
    told = _Announcer(run, [job], hearer, clock=lambda: clock[0])
    first, second = (JobHandle("slurm", id, job.name, job.key, job.folder, 4, 5.0) for id in ("12", "13"))
    told.changes([(first, JobStatus(JobState.QUEUED, "Priority"))])
    told.changes([(first, JobStatus(JobState.RUNNING))])
    for line in ("loads a checkpoint", "step 11  12/40 done  loss 3.1"):
        told.line(first, line)
    told.changes([(first, JobStatus(JobState.INTERRUPTED))])
    told.changes([(second, JobStatus(JobState.QUEUED))])
    assert hearer.bar == [
        (0.0, "queued, Priority (slurm 12)"),
        (0.0, "running (slurm 12)"),
        (30.0, "running, 12 of 40 steps done (slurm 12)"),
        (30.0, "interrupted, 12 of 40 steps done (slurm 12)"),
        (0.0, "queued (slurm 13)"),
    ], "another job of that name begins anew"
    for _ in range(200):
        told.line(second, "a line")
    assert sum("a line" in line for line in hearer.lines) == follow.MAX_LINES - 2
    clock[0] = 61.0
    told.line(second, "much later")
    assert "82 lines not shown; see" in hearer.lines[-2]


def test_what_a_job_says_of_how_far_it_is_moves_the_bar(run, job):
    hearer = Hearer()
    told = _Announcer(run, [job], hearer)
    handle = JobHandle("local", "12", job.name, job.key, job.folder, 1, 5.0)
    told.changes([(handle, JobStatus(JobState.RUNNING))])
    for line in ("rows of 3 of 4 files", "data profile, rows: 256 of 1024 (25%), 54.00 s to go", "x: 1 of 0 (0%), y"):
        told.line(handle, line)
    assert hearer.bar[1:] == [(25.0, "running, 256 of 1024 done (local 12)")]


def test_of_many_jobs_what_they_have_in_common_is_said_once(run, job):
    hearer = Hearer()
    specs = [dataclasses.replace(job, name=f"data-{i}", key=f"k{i}") for i in range(20)]
    told = _Announcer(run, specs, hearer)
    handles = [JobHandle("slurm", f"7_{i}", s.name, s.key, s.folder, 1, 5.0) for i, s in enumerate(specs)]
    told.changes([(handle, JobStatus(JobState.RUNNING)) for handle in handles])
    told.changes([(handle, JobStatus(JobState.DONE)) for handle in handles[:5]])
    assert len(hearer.lines) == 1 + 5
    assert hearer.lines[0].startswith("20 jobs, from ")
    assert hearer.bar[-1] == (25.0, "5 done, 15 running")


def test_who_is_no_longer_the_driver_submits_nothing(run, launcher, job, monkeypatch):
    claim = Claim(host="node7", pid=1, since="2026-11-20T12:00:00Z", boot_id="another-boot")
    monkeypatch.setattr(driver_lock, "newest_claim", lambda _: claim)
    with pytest.raises(LaunchError, match="now has another driver: process 1 on node7"):
        asyncio.run(follow_jobs(run, launcher, [job], Listener(str)))
    assert not job.folder.exists()
