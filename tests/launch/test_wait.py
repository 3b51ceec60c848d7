from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dflop.errors import LaunchError
from dflop.launch import JobHandle, JobState, JobStatus, Journal, make_launcher, run_job, run_job_async, wait
from dflop.launch.job import Launcher
from tests.launch.helpers import is_gone, make_spec, pids_of_hang


@pytest.fixture
def launcher() -> Launcher:
    return make_launcher("local", cancel_grace_s=0.5)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "run", "r1")


def states(journal: Journal) -> list[tuple[int, str]]:
    return [(r.attempt, r.state) for r in journal.records()]


def test_run_job_journals_follows_the_log_and_collects(launcher: Launcher, journal: Journal, tmp_path: Path) -> None:
    lines: list[str] = []
    seen: list[JobState] = []
    (result,) = run_job(
        launcher,
        make_spec(tmp_path / "job", "report", "hello"),
        journal,
        on_state=lambda _, status: seen.append(status.state),
        on_log_line=lines.append,
        poll_interval_s=0.05,
    )
    assert result["word"] == "hello"
    assert lines == ["rank 0 says hello"]
    assert seen[-1] is JobState.DONE
    assert states(journal) == [
        (0, state) for state in ("queued", "running", "done") if state == "queued" or state in seen
    ]


def test_a_failed_job_is_submitted_again_as_the_next_attempt(journal: Journal, tmp_path: Path) -> None:
    spec = make_spec(tmp_path / "job", "fail_on", "0")
    for _ in range(2):
        with pytest.raises(LaunchError, match="no microbatch"):
            run_job(make_launcher("inline"), spec, journal)
    assert states(journal) == [(0, "queued"), (0, "failed"), (1, "queued"), (1, "failed")]


def test_a_live_job_with_the_same_key_is_adopted(launcher: Launcher, journal: Journal, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    spec = make_spec(tmp_path / "job", "wait_for", str(gate))
    handle = launcher.submit(spec)
    journal.submitted(handle)  # and the driver dies here
    gate.touch()
    again = Journal(tmp_path / "run", "r1")
    assert again.live(spec.key) == handle
    assert run_job(make_launcher("local"), spec, again, poll_interval_s=0.05) == ["seen"]
    assert {r.job_id for r in again.records()} == {handle.job_id}
    assert again.live(spec.key) is None


def test_cancelling_the_waiter_cancels_the_job(launcher: Launcher, journal: Journal, tmp_path: Path) -> None:
    async def main() -> list[int]:
        spec = make_spec(tmp_path / "job", "hang", str(tmp_path))
        running = asyncio.create_task(run_job_async(launcher, spec, journal, poll_interval_s=0.05))
        pids = await asyncio.to_thread(pids_of_hang, tmp_path, 0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return pids

    pids = asyncio.run(main())
    assert all(is_gone(pid) for pid in pids)
    handle = journal.live("hang")
    assert handle is not None
    assert launcher.poll(handle).state is JobState.CANCELLED


def test_an_error_in_a_callback_does_not_cancel_the_job(launcher: Launcher, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    handle = launcher.submit(make_spec(tmp_path / "job", "wait_for", str(gate)))

    def stumble(handle: JobHandle, status: JobStatus) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(wait(launcher, handle, on_state=stumble))
    gate.touch()
    assert asyncio.run(wait(launcher, handle, poll_interval_s=0.05)).state is JobState.DONE
