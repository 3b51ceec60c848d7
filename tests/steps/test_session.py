import asyncio
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflop.errors import Cancelled, ConfigError, InfrastructureError, Interrupted, LaunchError, Stopped, StoreError
from dflop.launch import JobState, Journal
from dflop.records import RunRecord
from dflop.run import lifecycle
from dflop.run.directory import RunDir
from dflop.run.driver_lock import driver_of
from dflop.run.queue import launcher_of
from dflop.steps import session
from dflop.steps.session import RETRIES, driver_session, run_meant, with_retries
from dflop.store.console import query
from tests.jobs.configs import make_config, make_dataset, write_config
from tests.jobs.made import add_job, make_run
from tests.launch.helpers import is_gone, make_spec, pids_of_hang
from tests.store.spooled import read_spool


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path)


@pytest.fixture(autouse=True)
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ingested, which takes half a second; the test that wants it undoes this."""
    monkeypatch.setattr(session, "ingest", lambda _: None)


def drive(run: RunDir, outcome: BaseException | None = None, *, done: bool = False) -> None:
    """Drive a run in whose block that is raised."""

    async def main() -> None:
        async with driver_session(run, print):
            assert driver_of(run).pid == os.getpid()
            assert run.state()["state"] == lifecycle.RUNNING
            if done:
                lifecycle.note(run, lifecycle.DONE)
            if outcome is not None:
                raise outcome

    asyncio.run(main())


def states(run: RunDir) -> list[str]:
    return [r.state for r in read_spool(run.config().store, RunRecord)]


@pytest.mark.parametrize(("done", "trains", "state"), [(0, 1, "ready"), (1, 1, "done"), (0, 0, "done")])
def test_a_part_that_ends_well_leaves_the_run_ready_for_the_next_or_done(run, done, trains, state):
    run.write_state({**run.state(), "trains": bool(trains)})
    drive(run, done=done)
    assert (run.state()["state"], run.state()["trains"], states(run)) == (state, trains, [lifecycle.RUNNING, state])
    assert driver_of(run) is None


@pytest.mark.parametrize(
    ("error", "is_done", "state"),
    [
        (LaunchError("a rank raised"), False, lifecycle.FAILED),
        (LaunchError("the report cannot be written"), True, lifecycle.DONE),
        (Interrupted("told to stop"), False, lifecycle.INTERRUPTED),
        (Cancelled("by somebody"), False, lifecycle.CANCELLED),
        (ZeroDivisionError("a fault of ours"), False, lifecycle.FAILED),
        (asyncio.CancelledError(), False, lifecycle.INTERRUPTED),
    ],
)  # fmt: skip
def test_how_a_driver_ends_is_noted(run, error, is_done, state):
    with pytest.raises(type(error)):
        drive(run, error, done=is_done)
    assert run.state()["state"] == state
    assert driver_of(run) is None


def test_a_failed_run_is_in_the_database_at_once(run, monkeypatch):
    monkeypatch.undo()
    with pytest.raises(LaunchError):
        drive(run, LaunchError("a rank raised"))
    assert query(run.config().store, "select state from v_run")[1] == [("failed",)]


def test_neither_a_store_that_fails_nor_a_disk_that_is_full_hides_an_error(run, monkeypatch, capsys):
    note = lifecycle.note

    def broken(_store):
        raise StoreError("no space")

    def full(found, state):
        if state != lifecycle.RUNNING:
            raise StoreError("no space")
        note(found, state)

    monkeypatch.setattr(session, "ingest", broken)
    with pytest.raises(StoreError, match="locked"):
        drive(run, StoreError("locked"))
    monkeypatch.setattr(lifecycle, "note", full)
    with pytest.raises(LaunchError, match="a rank raised"):
        drive(run, LaunchError("a rank raised"))
    assert "that the run is failed cannot be recorded: no space" in capsys.readouterr().out


def test_jobs_that_nobody_waits_for_end_with_a_driver_that_is_told_to(run, tmp_path):
    spec = make_spec(run.job_folder("train"), "hang", str(tmp_path))

    async def main() -> None:
        async with driver_session(run, print):
            handle = launcher_of(run, run.config()).submit(spec)
            Journal(run.path, run.run_id).submitted(handle)
            await asyncio.to_thread(pids_of_hang, tmp_path, 0)
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert all(is_gone(pid) for pid in pids_of_hang(tmp_path, 0))


def told(run: RunDir, number: signal.Signals) -> None:
    """Drive a run whose process gets a signal; it has ten seconds to end of it."""

    async def main() -> None:
        async with driver_session(run, print):
            os.kill(os.getpid(), number)
            await asyncio.sleep(0 if signal.getsignal(number) is signal.SIG_IGN else 10)

    asyncio.run(main())


def test_jobs_that_a_stopped_driver_could_not_cancel_are_named(run, monkeypatch):
    def away(*_: object) -> None:
        raise LaunchError("squeue does not respond")

    monkeypatch.setattr(session, "live_jobs", away)
    add_job(run, "train", JobState.RUNNING)
    add_job(run, "data-0", JobState.RUNNING, JobState.DONE)
    with pytest.raises(Stopped, match=r"by SIGTERM: jobs that may still run: id-train \(dflop cancel\)") as caught:
        told(run, signal.SIGTERM)
    assert caught.value.exit_code == 143
    assert run.state()["state"] == lifecycle.INTERRUPTED
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_driver_that_was_started_with_nohup_outlives_its_session(run):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        told(run, signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert run.state()["state"] == lifecycle.READY


def test_a_job_that_ended_because_the_run_was_cancelled_has_not_failed(run):
    async def main() -> None:
        async with driver_session(run, print):
            assert not run.is_cancelled(), "taken up again"
            run.mark_cancelled(True)
            raise LaunchError("job `train` (slurm 7) cancelled\nwith a log")

    run.mark_cancelled(True)
    with pytest.raises(Cancelled, match=r"was cancelled: job `train` \(slurm 7\) cancelled\n"):
        asyncio.run(main())
    assert run.state()["state"] == lifecycle.CANCELLED


def test_a_configuration_begins_a_run_or_takes_one_up(tmp_path):
    make_dataset(tmp_path)
    said: list[str] = []
    with pytest.raises(ConfigError, match="unknown model family"):
        run_meant(make_config(tmp_path, "model.family=unknown"), say=said.append)
    assert not (tmp_path / "runs").exists(), "what cannot run leaves no trace"
    first = run_meant(make_config(tmp_path), say=said.append)
    assert run_meant(path=write_config(tmp_path), say=said.append) == first
    assert [line.split()[0] for line in said] == ["starting", "resuming"]
    assert run_meant(make_config(tmp_path, "train.seed=9"), name="small", say=said.append) == first
    assert said[2:] == [f"run {first.run_id} in {first.path}"], "a name goes before a configuration"
    other = run_meant(path=write_config(tmp_path), overrides=["train.num_steps=7"], say=print)
    assert (other == first, other.config().train.num_steps) == (False, 7)


def test_runs_are_looked_for_where_they_are(tmp_path, monkeypatch):
    """In DFLOP_RUNS, or where the configuration that is given has its runs; not in ./runs of a worker."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = make_run(tmp_path)
    with pytest.raises(ConfigError, match="no run and no run directory `small`"):
        run_meant(name="small", say=print)
    assert run_meant(path=write_config(tmp_path), name="small", say=print).path == run.path
    monkeypatch.setenv("DFLOP_RUNS", str(tmp_path / "runs"))
    assert run_meant(name="latest", say=print).path == run.path


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({}, "no configuration and no run given"),
        ({"path": "nowhere.yaml"}, "cannot read the configuration"),
        ({"name": "nowhere", "overrides": ["a.b=1"]}, "`overrides` need `config_path`"),
    ],
)
def test_what_cannot_be_meant_is_said(tmp_path, monkeypatch, given, what):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=what):
        run_meant(**given, say=print)
    assert not (tmp_path / "runs").exists()


def test_a_full_disk_is_told_with_what_to_do_and_a_missing_file_may_be_a_fault_of_ours(run):
    with pytest.raises(LaunchError, match=r"^disk error: No space left on device") as caught:
        drive(run, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "jobs.jsonl"))
    assert caught.value.where == "jobs.jsonl"
    assert "free space" in caught.value.hint
    assert (run.state()["state"], driver_of(run)) == (lifecycle.FAILED, None)
    with pytest.raises(FileNotFoundError):
        drive(run, FileNotFoundError(errno.ENOENT, "gone", "x"))


def test_a_driver_waits_for_no_torch() -> None:
    """Importing it takes seconds of a login node's processor, and drivers only watch."""
    program = "import sys, dflop.steps.session; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


class Work:
    """Raises the errors one after the other, then returns."""

    def __init__(self, *errors: Exception) -> None:
        self._errors, self.num_calls = list(errors), 0

    async def __call__(self) -> str:
        self.num_calls += 1
        if self._errors:
            raise self._errors.pop(0)
        return "done"


def test_what_the_cluster_did_is_tried_again_and_said(run, monkeypatch):
    monkeypatch.setattr(session, "RETRY_DELAY_S", 0.0)
    said: list[str] = []
    work = Work(InfrastructureError("node1 went away\nwith a log"), InfrastructureError("lost"))
    assert asyncio.run(with_retries(work, run, said.append)) == "done"
    assert said[0] == "node1 went away; retrying in 0 us, 2 more times if need be"
    assert said[1].endswith("once more if need be")
    work = Work(*(InfrastructureError(f"{i}") for i in range(9)))
    with pytest.raises(InfrastructureError, match=str(RETRIES)):
        asyncio.run(with_retries(work, run, str))
    assert work.num_calls == RETRIES + 1
    for error in (LaunchError("a rank raised"), Interrupted("on this machine"), ValueError("a fault of ours")):
        work = Work(error)
        with pytest.raises(type(error)):
            asyncio.run(with_retries(work, run, str))
        assert work.num_calls == 1
