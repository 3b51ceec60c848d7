from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dflop.launch import JobHandle, JobSpec, JobState, Launcher, make_launcher
from dflop.steps.follow import follow_job
from tests.launch.helpers import make_spec


@pytest.fixture
def launcher() -> Launcher:
    return make_launcher("local", cancel_grace_s=0.5)


@pytest.fixture
def job(tmp_path: Path) -> JobSpec:
    """Ends when there is a file `gate`."""
    return make_spec(tmp_path / "job", "wait_for", str(tmp_path / "gate"))


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

    assert asyncio.run(follow_job(run, launcher, job, lines.append, meanwhile=meanwhile, every_s=0.01)) == ["seen"]
    assert len(rounds) >= 6
    assert {handle.key for handle in rounds} == {job.key}
    beside = [line for line in lines if line.startswith("beside the job")]
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

    asyncio.run(follow_job(run, launcher, job, log.append, meanwhile=meanwhile, every_s=0.01))
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

        following = asyncio.create_task(follow_job(run, launcher, job, str, meanwhile=meanwhile, every_s=0.01))
        await began.wait()
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert launcher.poll(cancelled[0]).state is JobState.CANCELLED
