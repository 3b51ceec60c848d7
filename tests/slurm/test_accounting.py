"""A cluster with accounts, and one whose accounts are gone: jobs are followed all the same."""

import subprocess
from collections.abc import Iterator

import pytest

from dflop.launch import JobState
from dflop.launch.commands import run_command
from dflop.launch.watcher import Watcher
from tests.launch.helpers import end, make_spec, until
from tests.slurm.conftest import cluster_script

NEEDS_CLUSTER_ALONE = True


@pytest.fixture(scope="module")
def accounts(cluster: None) -> Iterator[None]:
    """Of the cluster, for as long as this module has it."""
    on = cluster_script("accounting", "on")
    assert on.returncode == 0, on.stdout
    yield
    off = cluster_script("accounting", "off")
    assert off.returncode == 0, off.stdout


def ended(job_id: str) -> str:
    """What accounting says of a job, once it says that it has ended."""

    def asked() -> str:
        command = ["sacct", "-X", "-n", "-P", "-o", "State", "-j", job_id]
        state = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        return state if state and not state.startswith(("PENDING", "RUNNING")) else ""

    return until(asked, what=f"the record of job {job_id}")


def watcher_that_sees_no_queue() -> Watcher:
    """As if squeue had forgotten all jobs: what is left is accounting."""

    def command(args: list[str]) -> subprocess.CompletedProcess[str]:
        if args[0] == "squeue":
            return subprocess.CompletedProcess(args, 1, "", "slurm_load_jobs error: Invalid job id specified")
        return run_command(args)

    return Watcher(poll_interval_s=0.2, lost_after_s=5, command=command)


def test_accounting_knows_the_end_of_a_forgotten_job_and_who_cancelled_it(accounts, launcher, tmp_path):
    done = launcher.submit(make_spec(tmp_path / "done", "report", "x"))
    cancelled = launcher.submit(make_spec(tmp_path / "cancelled", "wait_for", str(tmp_path / "never")))
    until(lambda: launcher.poll(cancelled).state is JobState.RUNNING, what="the job to run")
    assert end(launcher, done).state is JobState.DONE
    subprocess.run(["scancel", cancelled.job_id], check=True)
    end(launcher, cancelled)
    assert ended(done.job_id) == "COMPLETED"
    assert ended(cancelled.job_id).startswith("CANCELLED by ")
    for handle in (done, cancelled):
        handle.path("exit").unlink(missing_ok=True)
    found = watcher_that_sees_no_queue().statuses([done, cancelled])
    assert found == [(JobState.DONE, ""), (JobState.CANCELLED, "by root")]


def test_a_database_that_dies_under_a_job_is_no_news_of_it(accounts, launcher, tmp_path):
    gate = tmp_path / "gate"
    before = launcher.submit(make_spec(tmp_path / "before", "wait_for", str(gate)))
    until(lambda: launcher.poll(before).state is JobState.RUNNING, what="the job to run")
    assert cluster_script("accounting", "kill").returncode == 0
    failing = launcher.submit(make_spec(tmp_path / "failing", "fail_on", "0"))
    assert end(launcher, failing) == (JobState.FAILED, "rank 0: ValueError: no microbatch for rank 0")
    assert launcher.poll(before).state is JobState.RUNNING
    gate.touch()
    assert end(launcher, before).state is JobState.DONE
    cancelled = launcher.submit(make_spec(tmp_path / "cancelled", "wait_for", str(tmp_path / "never")))
    until(lambda: launcher.poll(cancelled).state is JobState.RUNNING, what="the job to run")
    subprocess.run(["scancel", cancelled.job_id], check=True)
    assert end(launcher, cancelled).state is JobState.CANCELLED
