import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from submitit.core.utils import DelayedSubmission

from dflop.errors import InfrastructureError, LaunchError
from dflop.launch import Change, JobHandle, JobSpec, JobState, JobStatus, Journal, run_jobs_async, wait
from dflop.launch.commands import NotNow
from dflop.launch.job import Launcher
from dflop.launch.local import LocalLauncher
from dflop.launch.payload import Payload
from tests.launch.helpers import OneByOne, make_spec, run_job


@pytest.fixture
def launcher() -> Launcher:
    return LocalLauncher(cancel_grace_s=0.5)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "run", "r1")


def states(journal: Journal) -> list[tuple[int, str]]:
    return [(r.attempt, r.state) for r in journal.records()]


def test_run_job_journals_follows_the_log_and_collects(launcher, journal, tmp_path):
    lines: list[str] = []
    seen: list[JobState] = []
    (result,) = run_job(
        launcher,
        make_spec(tmp_path / "job", "report", "hello"),
        journal,
        on_changes=lambda changes: seen.extend(status.state for _, status in changes),
        on_log_line=lambda _, line: lines.append(line),
    )
    assert result["word"] == "hello"
    assert lines == ["rank 0 says hello"]
    assert seen[-1] is JobState.DONE
    assert states(journal) == [
        (0, state) for state in ("queued", "running", "done") if state == "queued" or state in seen
    ]


def specs_of(folder: Path, function: str, *names: str) -> list[JobSpec]:
    return [
        make_spec(folder / "job", function, str(folder), name, name=f"r1-{name}", key=name, array="r1")
        for name in names
    ]


def together(launcher: Launcher, specs: list[JobSpec], journal: Journal, **options: object) -> list[list[object]]:
    return asyncio.run(run_jobs_async(launcher, specs, journal, poll_interval_s=0.05, **options))


def test_jobs_that_were_done_are_kept_and_only_the_others_start_again(launcher, journal, tmp_path):
    specs = specs_of(tmp_path, "fail_once", "a", "bad", "c")
    with pytest.raises(LaunchError, match=r"^1 of 3 jobs failed, the others keep running: .*bad luck"):
        together(launcher, specs, journal, keep_done=True)
    assert together(launcher, specs, journal, keep_done=True) == [["a"], ["bad"], ["c"]]
    assert [len((tmp_path / f"ran-{name}").read_text()) for name in ("a", "bad", "c")] == [1, 2, 1]
    assert together(launcher, specs, journal) == [["a"], ["bad"], ["c"]], "and all of them where nothing is kept"
    assert len((tmp_path / "ran-a").read_text()) == 2


def test_a_done_job_whose_results_are_gone_is_done_again(launcher, journal, tmp_path):
    specs = specs_of(tmp_path, "fail_once", "a")
    together(launcher, specs, journal, keep_done=True)
    for result in (tmp_path / "job").glob("*_result.pkl"):
        result.unlink()
    assert together(launcher, specs, journal, keep_done=True) == [["a"]]
    assert (tmp_path / "ran-a").read_text() == "xx"


def test_one_that_fails_ends_none_of_the_others(launcher, journal, tmp_path):
    changes: list[tuple[str, str]] = []

    def on_changes(found: Sequence[Change]) -> None:
        changes.extend((handle.name, status.state.value) for handle, status in found)
        if ("r1-bad", "failed") in changes:
            (tmp_path / "gate").touch()

    gate = make_spec(tmp_path / "job", "wait_for", str(tmp_path / "gate"), name="r1-gate", key="gate", array="r1")
    with pytest.raises(LaunchError, match="bad luck"):
        together(launcher, [gate, *specs_of(tmp_path, "fail_once", "bad")], journal, on_changes=on_changes)
    assert ("r1-gate", "done") in changes


def test_live_jobs_of_a_dead_driver_are_adopted_beside_new_ones(launcher, journal, tmp_path):
    specs = specs_of(tmp_path, "fail_once", "a", "c")
    handle = launcher.submit(specs[1])
    journal.submitted(handle)
    assert together(launcher, specs, Journal(tmp_path / "run", "r1")) == [["a"], ["c"]]
    assert {r.job_id for r in journal.records() if r.job_key == "c"} == {handle.job_id}


def test_what_the_job_did_to_itself_is_told_before_what_the_machine_did_to_another(journal, tmp_path):
    class Unlucky(Played):
        def collect(self, handle: JobHandle) -> list[object]:
            raise (LaunchError if handle.key == "b" else InfrastructureError)(f"why of {handle.key}")

    with pytest.raises(LaunchError, match="2 of 2 jobs failed: why of b") as caught:
        together(Unlucky(), specs_of(tmp_path, "report", "a", "b"), journal)
    assert not isinstance(caught.value, InfrastructureError)
    with pytest.raises(InfrastructureError, match=r"^why of a$"):
        together(Unlucky(), specs_of(tmp_path, "report", "a"), journal)


class Played(OneByOne):
    """Its jobs are done at once; polls of it fail as often as a test wants."""

    backend = "played"

    def __init__(self, num_stale: int = 0) -> None:
        self.num_stale, self.cancelled = num_stale, list[JobHandle]()

    def submit(self, spec: JobSpec) -> JobHandle:
        return JobHandle("played", spec.key, spec.name, spec.key, spec.folder, 1, 0.0)

    def poll(self, handle: JobHandle) -> JobStatus:
        if self.num_stale:
            self.num_stale -= 1
            raise OSError(116, "Stale file handle")
        return JobStatus(JobState.DONE)

    def cancel(self, *handles: JobHandle) -> None:
        self.cancelled += handles

    def interrupt(self, handle: JobHandle) -> None:
        """Nobody is there."""

    def collect(self, handle: JobHandle) -> list[object]:
        return [handle.key]


class Busy(Played):
    """Its jobs run for ever."""

    def poll(self, handle: JobHandle) -> JobStatus:
        return JobStatus(JobState.RUNNING)


def test_an_error_in_a_callback_does_not_cancel_the_job(journal, tmp_path):
    launcher = Busy()
    with pytest.raises(ZeroDivisionError):
        together(launcher, specs_of(tmp_path, "report", "a"), journal, on_changes=lambda _: 1 // 0)
    assert launcher.cancelled == []


def test_a_stale_file_handle_ends_no_waiting(journal, tmp_path):
    seen: list[str] = []

    def told(changes: Sequence[Change]) -> None:
        seen.extend(str(status) for _, status in changes)

    assert together(Played(num_stale=3), specs_of(tmp_path, "report", "a"), journal, on_changes=told) == [["a"]]
    assert seen == ["queued: cannot check: Stale file handle", "done"]


def test_many_jobs_that_are_cancelled_are_cancelled_in_one_call(journal, tmp_path):
    launcher = Busy()

    async def main() -> None:
        specs = specs_of(tmp_path, "report", "a", "b", "c")
        running = asyncio.create_task(run_jobs_async(launcher, specs, journal, poll_interval_s=0.01))
        while len(journal.records()) < 6:  # queued and running
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert [h.key for h in launcher.cancelled] == ["a", "b", "c"]
    last = [record for record in journal.records() if record.job_key == "b"][-1]
    assert (last.state, last.reason) == ("cancelled", "its driver was stopped")


class Silent(Played):
    """Its controller answers at the third submission, and to no scancel."""

    num_asked = 0

    def submit(self, spec: JobSpec) -> JobHandle:
        self.num_asked += 1
        if self.num_asked < 3:
            raise NotNow("Unable to contact slurm controller")
        return super().submit(spec)

    def cancel(self, *handles: JobHandle) -> None:
        if handles:
            raise LaunchError("scancel failed: Unable to contact slurm controller")


def test_a_controller_that_does_not_answer_at_submission_is_waited_for_and_that_is_said_once(
    journal, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(wait, "PAUSE_S", 0.01)
    specs = specs_of(tmp_path, "report", "a")
    assert together(Silent(), specs, journal) == [["a"]]
    (said,) = caplog.messages
    assert "Unable to contact slurm controller; retrying for up to 30" in said
    monkeypatch.setattr(wait, "PATIENCE_S", 0.0)
    with pytest.raises(NotNow):
        together(Silent(), specs, Journal(tmp_path / "other", "r1"))


@pytest.mark.parametrize("has_submitted", [True, False])
def test_who_is_told_to_stop_stops_though_no_job_can_be_told(journal, tmp_path, caplog, has_submitted):
    launcher = Silent()
    launcher.num_asked = 9 if has_submitted else -9
    launcher.poll = Busy().poll

    async def main() -> None:
        running = asyncio.create_task(run_jobs_async(launcher, specs_of(tmp_path, "report", "a"), journal))
        while len(journal.records()) < 2 if has_submitted else launcher.num_asked == -9:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert running.cancelled()

    asyncio.run(main())
    assert ("the jobs may be running: cancel them with `dflop cancel`" in caplog.text) is has_submitted


class Answers(OneByOne):
    """A launcher that knows what became of jobs by their ids, and gives new ones the id `new`."""

    backend = "slurm"

    def __init__(self, states: dict[str, JobState]) -> None:
        self.states = states

    def submit(self, spec: JobSpec) -> JobHandle:
        return JobHandle(self.backend, "new", spec.name, spec.key, spec.folder, 1, 99.0)

    def poll(self, handle: JobHandle) -> JobStatus:
        return JobStatus(self.states[handle.job_id])

    def cancel(self, *handles: JobHandle) -> None:
        assert not handles

    interrupt = collect = cancel


@pytest.mark.parametrize(
    ("noted", "by_hand", "adopted"),
    [
        ("running", "running", "1"), ("queued", "running", "2"), ("running", "queued", "1"), ("queued", "queued", "1"),
        ("failed", "running", "2"), ("running", "failed", "1"), ("done", "queued", "2"), ("failed", "done", "2"),
        ("failed", "failed", "new"), ("", "running", "2"), ("", "done", "2"), ("", "cancelled", "new"),
    ],
)  # fmt: skip
def test_of_jobs_of_one_work_the_one_that_runs_is_followed_whoever_submitted_it(
    journal, tmp_path, noted, by_hand, adopted
):
    """Job 1 is a driver's, which had not seen its end; job 2 somebody submitted besides, from the job's folder."""
    spec = make_spec(tmp_path / "job", "report", "x", key="train")
    if noted:
        journal.submitted(JobHandle("slurm", "1", spec.name, spec.key, spec.folder, 1, 5.0))
    spec.folder.mkdir()
    DelayedSubmission(Payload("slurm", spec)).dump(spec.folder / "2_submitted.pkl")
    launcher = Answers({"1": JobState(noted or "lost"), "2": JobState(by_hand), "new": JobState.QUEUED})
    (handle,) = wait.adopt_or_submit_all(launcher, [spec], journal)
    assert handle.job_id == adopted
    assert journal.latest()["train"][0] == handle, "the newest of the journal is the one that is followed"
    assert wait.adopt_or_submit_all(launcher, [spec], journal) == [handle]
