"""`dflop train` and who drives: killed and adopted, refused, cancelled, told to stop; without any Prefect."""

import os
import signal
from pathlib import Path

import pytest

from dflop.launch import JobState, Journal
from dflop.run import lifecycle
from dflop.run.directory import RunDir
from dflop.run.driver_lock import driver_of
from dflop.run.status import jobs_of
from tests.jobs.training import fresh, planned_run, profiled
from tests.launch.helpers import Background, is_gone, live, until
from tests.test_cli import assert_refused, dflop, python_path

NUM_STEPS = 40

pytestmark = [pytest.mark.lane("jobs"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run with profiles and a plan, of which training is left."""
    overrides = (f"train.num_steps={NUM_STEPS}", "train.checkpoint_every=5", "compare.num_batches=0")
    return profiled(planned_run(tmp_path_factory.mktemp("planned"), *overrides))


@pytest.fixture
def run(planned: RunDir, tmp_path: Path) -> RunDir:
    return fresh(planned, tmp_path)


@pytest.fixture
def start(run: RunDir):
    """Starts `dflop train latest`."""
    started, folder = list[Background](), run.path.parents[1]

    def one() -> Background:
        log = folder / f"driver-{len(started)}.log"
        started.append(Background("dflop.cli", "train", "latest", log=log, cwd=folder, PYTHONPATH=python_path()))
        return started[-1]

    yield one
    for driver in started:
        driver.kill()
    dflop("cancel", "latest", cwd=run.path.parents[1])


def training(run: RunDir, *, from_step: int = 1) -> list[int]:
    """Pids of the ranks of the training job, once it has made a checkpoint."""

    def look() -> list[int] | None:
        handle = live(Journal(run.path, run.run_id), f"{run.run_id}/train")
        if handle is None or run.next_step() < from_step:
            return None
        files = [handle.path(f"{rank}.pid") for rank in range(handle.num_tasks)]
        return [int(file.read_text().split()[0]) for file in files] if all(f.exists() for f in files) else None

    return until(look, what="training", limit_s=180)


def test_a_killed_driver_leaves_its_job_and_the_next_one_adopts_it(run, start):
    first = start()
    pids = training(run)
    refused = dflop("train", "latest", cwd=run.path.parents[1])
    assert_refused(refused, 5, f"already has a driver: process {first.process.pid} on", "since 20")
    first.kill()
    assert driver_of(run) is None
    assert not any(is_gone(pid) for pid in pids)
    for pid in pids:  # so that the job is not over before the next driver comes
        os.kill(pid, signal.SIGSTOP)
    listed = dflop("runs", "list", "--format", "json", cwd=run.path.parents[1]).stdout
    assert '"state": "abandoned"' in listed
    assert "train running" in listed
    second = start()
    second.hears("is running")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    said = second.ends(0)
    assert f"  {NUM_STEPS}/{NUM_STEPS} done" in said
    assert [job.state for job in jobs_of(run) if job.name == "train"] == [JobState.DONE], "submitted once"
    assert run.state()["state"] == lifecycle.DONE
    assert run.report_file.is_file()


def test_a_cancelled_run_is_left_by_its_driver_and_can_be_taken_up_again(run, start):
    driver = start()
    pids = training(run)
    done = dflop("cancel", "latest", cwd=run.path.parents[1])
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 1
    assert all(is_gone(pid) for pid in pids)
    assert "was cancelled" in driver.ends(1)
    assert run.state()["state"] == lifecycle.CANCELLED
    saved = run.next_step()
    said = start().ends(0)
    assert f"step {saved}  {saved + 1}/{NUM_STEPS} done" in said, "goes on from its checkpoint"
    states = [job.state for job in jobs_of(run) if job.name == "train"]
    assert states == [JobState.CANCELLED, JobState.DONE]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_driver_that_is_told_to_stop_takes_its_jobs_along(run, start, number, code):
    driver = start()
    pids = training(run)
    driver.process.send_signal(number)
    said = driver.ends(code, 60)
    assert f"interrupted by {number.name}: 1 job cancelled; the same command resumes " in said
    assert all(is_gone(pid) for pid in pids)
    assert run.state()["state"] == lifecycle.INTERRUPTED
    assert driver_of(run) is None


def test_jobs_of_a_killed_driver_are_reaped(run, start):
    driver = start()
    pids = training(run)
    driver.kill()
    told = dflop("reap", "--dry-run", "--format", "json", cwd=run.path.parents[1])
    assert '"fate": "would be cancelled"' in told.stdout
    assert not any(is_gone(pid) for pid in pids)
    done = dflop("reap", "--format", "json", cwd=run.path.parents[1])
    assert '"fate": "cancelled"' in done.stdout
    assert all(is_gone(pid) for pid in pids)
    assert run.state()["state"] == lifecycle.CANCELLED
