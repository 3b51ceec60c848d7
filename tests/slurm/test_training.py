"""`slurm/train.sbatch` on a real Slurm, four tasks on two nodes: a rank that is killed, a warning, a last start.

Each test takes the run as the one before left it. A driver that profiles, plans and trains: test_pipeline.py.
"""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from dflop.run.directory import RunDir
from tests.jobs.training import set_config
from tests.launch.helpers import REPO, parent_of, until
from tests.slurm.faults import end_of, make_environment, observations, processes, run_on_two_nodes, shown

NUM_RANKS = 4


@pytest.fixture(scope="module")
def folder(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the environment that train.sbatch activates."""
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    folder = tmp_path_factory.mktemp("training")
    make_environment(folder, PYTHONPATH=str(REPO))
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> RunDir:
    """With a plan, and nothing trained."""
    settings = ("cluster.num_processes_per_node=2", "train.checkpoint_every=2", "train.num_steps=10000")
    run = run_on_two_nodes(folder, *settings, num_replicas=2)
    assert run.plan().num_processes == NUM_RANKS
    return run


def test_a_job_whose_rank_is_killed_leaves_no_process(run, folder):
    job_id = sbatch(folder, run)
    until(lambda: run.next_step() > 0, what="a checkpoint", limit_s=180)
    (scheduler,) = schedulers(run)
    os.kill(parent_of(scheduler), signal.SIGKILL)  # rank 0, as the kernel does when memory runs out
    until(lambda: not processes(str(run.path)), what="every process of the job to end")
    assert end_of(job_id) == "FAILED"


def test_a_warned_job_checkpoints_where_it_is_and_goes_on_under_its_id(run, folder):
    first = run.next_step()
    job_id = sbatch(folder, run)
    until(lambda: f"  {first + 1}/10000 done" in log_of(folder), what="the first step of the resumed training")
    assert f"  {first}/10000 done" not in log_of(folder)
    subprocess.run(["scancel", "--signal=USR2", job_id], check=True)  # as --signal=USR2@60 does before the limit
    until(lambda: shown(job_id, "Restarts") == "1", what="the job to requeue itself")
    stopped = run.next_step()
    assert stopped > first
    assert "SIGUSR2: stopping after the current step" in log_of(folder)
    assert "scheduler dead" not in log_of(folder)
    until(lambda: f"  {stopped + 2}/10000 done" in log_of(folder), what="steps after the requeue", limit_s=120)
    subprocess.run(["scancel", job_id], check=True)
    assert end_of(job_id) == "CANCELLED"
    until(lambda: not processes(str(run.path)), what="every process of the job to end")
    assert log_of(folder).count(f"  {stopped}/10000 done") == 1
    assert log_of(folder).count(f"  {stopped + 1}/10000 done") == 1
    assert (run.path / f"stops-{job_id}").read_text().startswith(f"{first} {stopped}\n")


def test_train_sbatch_goes_on_to_the_end_after_that(run, folder):
    first = run.next_step()
    set_config(run, f"train.num_steps={first + 2}")
    assert end_of(sbatch(folder, run), 180) == "COMPLETED", log_of(folder)
    assert run.next_step() == first + 2
    seen = observations(run)
    last = {(o.step, o.rank) for o in seen if o.attempt == max(o.attempt for o in seen)}
    assert last == {(step, rank) for step in (first, first + 1) for rank in range(NUM_RANKS)}
    assert not processes(str(run.path))


def sbatch(folder: Path, run: RunDir) -> str:
    """Job id of train.sbatch as it stands, submitted from a folder with a `.venv`; its log is cleared first."""
    (folder / "train.log").unlink(missing_ok=True)
    tasks = f"--ntasks={NUM_RANKS}"
    command = ["sbatch", "--parsable", "--output=train.log", tasks, REPO / "slurm" / "train.sbatch", run.path]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def log_of(folder: Path) -> str:
    log = folder / "train.log"
    return log.read_text() if log.exists() else ""


def schedulers(run: RunDir) -> list[int]:
    return [pid for pid in processes(str(run.path)) if pid in processes("dflop.jobs.scheduler")]
