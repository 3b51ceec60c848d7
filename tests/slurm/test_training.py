"""Every job of a run on a real Slurm, two nodes with two tasks each: from profiles to a training that is killed."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
from pathlib import Path

import pytest

from dflop.config import load_config
from dflop.data.dataset_profile import profile_key
from dflop.data.demo import make_demo_dataset
from dflop.launch import Journal, run_jobs_async
from dflop.records import StepObservation, StepPlan
from dflop.run import lifecycle
from dflop.run.batches import TRAIN
from dflop.run.directory import RunDir, dataset_ref, family_of
from dflop.run.launcher import launcher_of
from dflop.steps import planning, submit
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from tests.jobs.training import set_config
from tests.launch.helpers import REPO, parent_of, run_job, until
from tests.slurm.faults import end_of, make_environment, processes, shown, write_config


@pytest.fixture(scope="module")
def folder(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the dataset, and the environment train.sbatch activates."""
    folder = tmp_path_factory.mktemp("training")
    make_demo_dataset(folder / "data", num_samples=48)
    make_environment(folder, PYTHONPATH=str(REPO))
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> RunDir:
    """A run that was profiled, planned and trained for five steps, each on Slurm."""
    write_config(
        folder, "on-slurm", slurm={"time_limit_min": 5}, data_profile={"num_shards": 2},
        model_profile={"budget_s": 8, "num_probes": 8, "num_repeats": 1}, plan={"global_batch_size": 8},
        train={"num_steps": 5, "checkpoint_every": 2},
    )  # fmt: skip
    run, _ = lifecycle.begin(load_config(folder / "run.yaml"))
    config = run.config()
    launcher, journal = launcher_of(run, config), Journal(run.path, run.run_id)
    data_key = profile_key(dataset_ref(config), family_of(config))
    asyncio.run(run_jobs_async(launcher, submit.data_jobs(run, config, data_key, "slurm"), journal))
    ingest(config.store)
    with Reader(config.store) as reader:
        run.write_shapes(reader.shapes(data_key))
    model_key, hardware, _ = planning.model_profile_key(config)
    modules = [spec.module for spec in planning.used_modules(planning.bound_family(config), run.shapes())]
    assert len(modules) > 1
    for group in submit.model_jobs(run, config, model_key, hardware, modules):
        asyncio.run(run_jobs_async(launcher, group, journal))
    ingest(config.store)
    planning.plan_run(run, config, model_key, lambda line: None)
    ingest(config.store)
    results = run_job(launcher, submit.train_job(run, config, TRAIN, run.plan().num_processes), journal)
    assert results == [{"first_step": 0, "num_steps": 5}] * run.plan().num_processes
    return run


def test_a_run_trains_across_nodes(trained):
    num_processes = trained.plan().num_processes
    seen = observations(trained)
    assert sorted((o.step, o.rank) for o in seen) == [(t, r) for t in range(5) for r in range(num_processes)]
    assert all(math.isfinite(o.loss) for o in seen)
    assert seen[-1].loss < seen[0].loss
    job = Journal(trained.path, trained.run_id).records()[-1]
    assert "scheduler dead" not in (Path(job.folder) / f"{job.job_id}_0_log.err").read_text()
    assert schedulers(trained) == []
    pid_files = [Path(job.folder) / f"{job.job_id}_{rank}.pid" for rank in range(num_processes)]
    assert len({f.read_text().split()[1] for f in pid_files}) == 2
    assert trained.next_step() == 5
    with Reader(trained.config().store) as reader:
        assert {p.step for p in reader.records(StepPlan, where={"run_id": trained.run_id})} == set(range(5))


def test_train_sbatch_resumes_and_a_job_whose_rank_is_killed_leaves_no_process(trained, folder):
    first = trained.next_step()
    set_num_steps(trained, 10_000)
    job_id = sbatch(folder, trained)
    until(lambda: trained.next_step() > first, what="a checkpoint of the resumed training")
    assert f"  {first + 1}/10000 done" in log_of(folder)
    assert f"  {first}/10000 done" not in log_of(folder)
    (scheduler,) = schedulers(trained)
    os.kill(parent_of(scheduler), signal.SIGKILL)  # rank 0, as the kernel does when memory runs out
    until(lambda: not processes(str(trained.path)), what="every process of the job to end")
    assert end_of(job_id) == "FAILED"


def test_a_warned_job_checkpoints_where_it_is_and_goes_on_under_its_id(trained, folder):
    first = trained.next_step()
    set_num_steps(trained, 10_000)
    job_id = sbatch(folder, trained)
    until(lambda: f"  {first + 1}/10000 done" in log_of(folder), what="the first step of the resumed training")
    subprocess.run(["scancel", "--signal=USR2", job_id], check=True)  # as --signal=USR2@60 does before the limit
    until(lambda: shown(job_id, "Restarts") == "1", what="the job to requeue itself")
    stopped = trained.next_step()
    assert stopped > first
    assert "SIGUSR2: stopping after the current step" in log_of(folder)
    assert "scheduler dead" not in log_of(folder)
    until(lambda: f"  {stopped + 2}/10000 done" in log_of(folder), what="steps after the requeue", limit_s=120)
    subprocess.run(["scancel", job_id], check=True)
    assert end_of(job_id) == "CANCELLED"
    until(lambda: not processes(str(trained.path)), what="every process of the job to end")
    assert log_of(folder).count(f"  {stopped}/10000 done") == 1
    assert log_of(folder).count(f"  {stopped + 1}/10000 done") == 1
    assert (trained.path / f"stops-{job_id}").read_text().startswith(f"{first} {stopped}\n")


def test_train_sbatch_goes_on_to_the_end_after_that(trained, folder):
    first = trained.next_step()
    set_num_steps(trained, first + 2)
    assert end_of(sbatch(folder, trained)) == "COMPLETED", log_of(folder)
    assert trained.next_step() == first + 2
    seen = observations(trained)
    assert {o.step for o in seen if o.attempt == max(o.attempt for o in seen)} == {first, first + 1}
    assert not processes(str(trained.path))


def observations(run: RunDir) -> list[StepObservation]:
    ingest(run.config().store)
    with Reader(run.config().store) as reader:
        found = reader.records(StepObservation, where={"run_id": run.run_id})
    return sorted(found, key=lambda o: (o.step, o.rank))


def set_num_steps(run: RunDir, num_steps: int) -> None:
    set_config(run, f"train.num_steps={num_steps}")


def sbatch(folder: Path, run: RunDir) -> str:
    """Job id of train.sbatch as it stands, submitted from a folder with a `.venv`; its log is cleared first."""
    (folder / "train.log").unlink(missing_ok=True)
    tasks = f"--ntasks={run.plan().num_processes}"
    command = ["sbatch", "--parsable", "--output=train.log", tasks, REPO / "slurm" / "train.sbatch", run.path]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def log_of(folder: Path) -> str:
    log = folder / "train.log"
    return log.read_text() if log.exists() else ""


def schedulers(run: RunDir) -> list[int]:
    return [pid for pid in processes(str(run.path)) if pid in processes("dflop.jobs.scheduler")]
