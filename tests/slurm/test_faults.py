"""What clusters do to a training, one thing after the other, to one run; and what is left of it at the end.

Each test takes the run as the one before left it.
"""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from dflop.errors import Cancelled, LaunchError
from dflop.launch import JobHandle, JobState, Journal
from dflop.records import StepObservation
from dflop.run.directory import RunDir
from dflop.store import settings
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from tests.launch.helpers import REPO, until
from tests.slurm.conftest import cluster_script
from tests.slurm.faults import (
    Drivers,
    gets_on,
    observations,
    pid_of,
    processes,
    run_on_two_nodes,
    shown,
    slurm,
    strays,
    train_job,
)

NEEDS_CLUSTER_ALONE = True


@pytest.fixture(scope="module")
def run(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    folder = tmp_path_factory.mktemp("faults")
    # Snapshots are published every second here and stay for an hour by default, which is gigabytes.
    settings.init(folder / "store", keep_snapshots=2, grace_s=5)
    return run_on_two_nodes(folder, f"store={folder / 'store'}", "cluster.slurm.partition=low")


@pytest.fixture(scope="module")
def drivers(run: RunDir) -> Iterator[Drivers]:
    found = Drivers(run)
    yield found
    found.stop()


def job_of(run: RunDir) -> JobHandle:
    """The training job, once it has made steps."""
    handle = until(lambda: train_job(run), what="a training job")
    gets_on(handle)
    return handle


@pytest.mark.lane("slurm-heart")
def test_a_driver_that_is_killed_is_succeeded_by_one_that_adopts_its_job(run, drivers):
    first = drivers.start()
    handle = job_of(run)
    first.kill()
    second = drivers.start()
    second.hears(f"{handle} is running")
    gets_on(handle)
    third = drivers.start()
    third.ends(LaunchError.exit_code, 60)
    drivers.all.pop()
    assert shown(handle.job_id, "Restarts") == "0"
    assert {r.job_id for r in Journal(run.path, run.run_id).records()} == {handle.job_id}


def test_a_controller_that_is_killed_and_comes_back_costs_nothing(run, drivers):
    handle = job_of(run)
    assert cluster_script("controller", "kill").returncode == 0
    drivers.last.hears("squeue has not responded since", limit_s=150)
    gets_on(handle)
    assert cluster_script("controller", "start").returncode == 0
    until(lambda: shown(handle.job_id, "JobState") == "RUNNING", what="the controller")
    gets_on(handle)
    assert drivers.last.process.poll() is None
    assert train_job(run) == handle


@pytest.mark.lane("slurm-heart")
def test_a_preempted_training_makes_way_and_goes_on(run, drivers):
    handle, stopped_at = job_of(run), run.next_step()
    command = ["sbatch", "--parsable", "--partition=debug", "--nodes=4", "--exclusive", "--output=/dev/null"]
    intruder = slurm(*command, "--wrap=sleep 3")
    until(lambda: shown(intruder, "JobState") == "COMPLETED", what="the intruder to end", limit_s=120)
    drivers.last.hears("requeued once", limit_s=120)
    gets_on(handle, limit_s=180)
    assert train_job(run) == handle
    assert int(shown(handle.job_id, "Restarts")) == 1
    began, reached = map(int, handle.path("stops").read_text().split())
    assert reached >= stopped_at >= began


def test_a_node_that_goes_down_costs_the_steps_since_the_checkpoint(run, drivers):
    handle = job_of(run)
    node = slurm("scontrol", "show", "hostnames", nodes_of(handle)).split()[-1]
    restarts = int(shown(handle.job_id, "Restarts"))
    # Drained, too: its slurmd answers, which alone would bring it back within a second.
    slurm("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    try:
        until(lambda: int(shown(handle.job_id, "Restarts") or 0) > restarts, what="a requeue", limit_s=120)
        gets_on(handle, limit_s=180)
        assert train_job(run) == handle
        assert node not in nodes_of(handle)
    finally:
        slurm("scontrol", "update", f"nodename={node}", "state=resume")


@pytest.mark.lane("slurm-heart")
def test_a_rank_that_is_killed_is_named_and_the_next_driver_goes_on(run, drivers):
    handle = job_of(run)
    os.kill(pid_of(handle, 1), signal.SIGKILL)
    drivers.last.hears("rank 1 died (signal 9) on node")
    drivers.last.ends(LaunchError.exit_code, 60)
    assert Journal(run.path, run.run_id).records()[-1].state == JobState.FAILED
    drivers.start()
    until(lambda: train_job(run) not in (None, handle) and job_of(run), what="steps")


def test_a_training_that_is_cancelled_ends_its_driver_and_the_next_one_goes_on(run, drivers):
    handle = job_of(run)
    slurm("scancel", handle.job_id)
    assert "cancelled" in drivers.last.ends(LaunchError.exit_code, 60)
    until(lambda: not processes(f"submitit.core._submit {handle.folder}"), what="every rank to end")
    drivers.start()
    job_of(run)


def test_a_slurmstepd_that_is_killed_is_no_end_of_its_tasks(run, drivers):
    handle = job_of(run)
    (stepd, *_) = processes(f"slurmstepd: [{handle.job_id}.0]")
    os.kill(stepd, signal.SIGKILL)
    gets_on(handle)
    assert drivers.last.process.poll() is None


@pytest.mark.lane("slurm-heart")
def test_dflop_cancel_empties_the_queue(run, drivers):
    job_of(run)
    command = [sys.executable, "-m", "dflop.cli", "cancel", str(run.path)]
    subprocess.run(command, cwd=REPO, check=True, timeout=120)
    assert slurm("squeue", "-h", f"--name={run.run_id}-train", "-t", "pending,running") == ""
    drivers.last.ends(Cancelled.exit_code, 60)
    until(lambda: not processes(str(run.path)), what="every process of the run to end")


@pytest.mark.lane("slurm-heart")
def test_after_all_that_no_step_and_no_row_is_missing(run):
    """Every step by every rank; what was done twice, between a checkpoint and a death, has the same loss."""
    num_steps, num_ranks = run.next_step(), run.plan().num_processes
    assert num_steps > 20
    found = observations(run)
    times = Counter((o.step, o.rank) for o in found)
    missing = [(s, r) for s in range(num_steps) for r in range(num_ranks) if not times[s, r]]
    assert missing == []
    assert strays(found) == {}
    ingest(run.config().store)
    with Reader(run.config().store) as reader:
        assert len(reader.records(StepObservation, where={"run_id": run.run_id})) == len(found)
    states = [json.loads(line)["state"] for line in (run.path / "jobs.jsonl").read_text().splitlines()]
    assert states[-1] == "cancelled"


def nodes_of(handle: JobHandle) -> str:
    """Nodes of a running job, as Slurm writes them."""
    return slurm("squeue", "-h", "-o", "%N", "-j", handle.job_id)
