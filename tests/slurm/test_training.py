"""A run that a person trains with its own batch script, on a real Slurm, four tasks on two nodes; and with a driver.

Each test takes the run as the one before left it. A driver that profiles, plans and trains: test_pipeline.py.
"""

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from dflop.launch import Journal
from dflop.run.directory import RunDir
from dflop.steps import submit
from dflop.steps.dry_run import script_by_hand
from tests.jobs.slow_steps import with_slow_steps
from tests.jobs.training import set_config
from tests.launch.helpers import parent_of, until
from tests.slurm.faults import Drivers, end_of, observations, processes, run_on_two_nodes, shown, train_job

NUM_RANKS = 4


@pytest.fixture(scope="module")
def run(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """With a plan, and nothing trained."""
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    settings = ("cluster.num_processes_per_node=2", "train.checkpoint_every=2", "train.num_steps=10000")
    run = run_on_two_nodes(tmp_path_factory.mktemp("training"), *settings, num_replicas=2)
    assert run.plan().num_processes == NUM_RANKS
    return run


@pytest.fixture
def drivers(run: RunDir) -> Iterator[Drivers]:
    found = Drivers(run)
    yield found
    found.stop()


class ByHand:
    """A job that a person submitted."""

    def __init__(self, run: RunDir, mode: str = "train") -> None:
        self.script = script_by_hand(run, mode)
        command = ["sbatch", "--parsable", str(self.script)]
        self.job_id = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    @property
    def log(self) -> str:
        path = self.script.parent / f"{self.job_id}_0_log.err"
        return path.read_text() if path.exists() else ""

    def reaches(self, *words: str, limit_s: float = 120) -> None:
        until(lambda: any(w in self.log for w in words), what=f"`{words}` in {self.log[-2000:]}", limit_s=limit_s)


def test_a_job_whose_rank_is_killed_leaves_no_process(run):
    job = ByHand(run)
    until(lambda: run.next_step() > 0, what="a checkpoint", limit_s=180)
    (scheduler,) = schedulers(run)
    os.kill(parent_of(scheduler), signal.SIGKILL)  # rank 0, as the kernel does when memory runs out
    until(lambda: not processes(str(run.path)), what="every process of the job to end")
    assert end_of(job.job_id) == "FAILED"


def test_a_warned_job_checkpoints_where_it_is_and_goes_on_under_its_id(run):
    first = run.next_step()
    job = ByHand(run)
    job.reaches(f"  {first + 1}/10000 done")
    assert f"  {first}/10000 done" not in job.log
    subprocess.run(["scancel", "--signal=USR2", job.job_id], check=True)  # as --signal=USR2@60 does before the limit
    until(lambda: shown(job.job_id, "Restarts") == "1", what="the job to requeue itself")
    stopped = run.next_step()
    assert stopped > first
    assert "SIGUSR2: stopping after the current step" in job.log
    assert "scheduler dead" not in job.log
    job.reaches(f"  {stopped + 2}/10000 done")
    subprocess.run(["scancel", job.job_id], check=True)
    assert end_of(job.job_id) == "CANCELLED"
    until(lambda: not processes(str(run.path)), what="every process of the job to end")
    assert job.log.count(f"  {stopped}/10000 done") == 1
    assert job.log.count(f"  {stopped + 1}/10000 done") == 1
    assert (job.script.parent / f"{job.job_id}_stops").read_text().startswith(f"{first} {stopped}\n")


def test_it_goes_on_to_the_end_after_that(run):
    first = run.next_step()
    set_config(run, f"train.num_steps={first + 2}")
    job = ByHand(run)
    assert end_of(job.job_id, 180) == "COMPLETED", job.log
    assert run.next_step() == first + 2
    assert trained_by(run, first) == {max(o.attempt for o in observations(run))}
    assert not processes(str(run.path))


def test_a_driver_follows_the_job_that_a_person_started_and_submits_none(run, drivers, monkeypatch):
    first = run.next_step()
    set_config(run, f"train.num_steps={first + 60}")
    monkeypatch.setattr(submit, "train_job", with_slow_steps(submit.train_job))
    before = jobs_of(run)
    job = ByHand(run)
    job.reaches(f"  {first + 2}/{first + 60} done")
    driver = drivers.start()
    second = ByHand(run)  # while the first one trains, a driver or not
    assert end_of(second.job_id, 600) == "FAILED"
    assert f"is being trained by job slurm dflop {job.job_id}, process" in second.log
    assert driver.process.wait(300) == 0, driver.output
    assert jobs_of(run) - before - {second.job_id} == {job.job_id}, driver.output
    assert f"(slurm {job.job_id}) is done" in driver.output
    assert end_of(job.job_id) == "COMPLETED"
    assert run.next_step() == first + 60
    assert len(trained_by(run, first)) == 1


def test_a_job_that_a_person_starts_while_a_drivers_job_trains_ends_at_once_and_changes_nothing(run, drivers):
    first = run.next_step()
    set_config(run, f"train.num_steps={first + 1000}")
    driver = drivers.start()
    until(lambda: run.next_step() > first, what="a checkpoint", limit_s=180)
    trains = train_job(run).job_id
    job = ByHand(run)
    assert end_of(job.job_id, 600) == "FAILED"
    assert f"run `{run.run_id}` is being trained by job slurm dflop {trains}, process" in job.log
    assert "this job ends, checkpoints stay" in job.log
    reached = run.next_step()
    until(lambda: run.next_step() > reached + 2, what="checkpoints of the driver's job", limit_s=120)
    assert driver.process.poll() is None, driver.output
    assert train_job(run).job_id == trains
    seen = [(o.step, o.rank) for o in observations(run) if o.step >= first]
    assert len(seen) == len({*seen}), "every rank trained every step once"


def trained_by(run: RunDir, first: int) -> set[int]:
    """Attempts that trained the steps from one on, each of which every rank trained once."""
    seen = [o for o in observations(run) if o.step >= first]
    assert sorted((o.step, o.rank) for o in seen) == [
        (step, rank) for step in range(first, run.next_step()) for rank in range(NUM_RANKS)
    ]
    return {o.attempt for o in seen}


def jobs_of(run: RunDir) -> set[str]:
    """Ids of training jobs that drivers have noted."""
    return {handle.job_id for handle, _ in Journal(run.path, run.run_id).jobs().values()}


def schedulers(run: RunDir) -> list[int]:
    return [pid for pid in processes(str(run.path)) if pid in processes("dflop.jobs.scheduler")]
