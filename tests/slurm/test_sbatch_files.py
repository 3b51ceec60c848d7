"""slurm/driver.sbatch as it stands, submitted from a folder with a `.venv`: profiles and a plan.

A whole pipeline is in test_pipeline.py, training in test_training.py.
"""

import os
import subprocess
from pathlib import Path

import pytest

from dflop.data.demo import make_demo_dataset
from dflop.launch import Journal
from dflop.store import console
from tests.launch.helpers import REPO, until
from tests.slurm.faults import end_of, make_environment, write_config

DRIVER = REPO / "slurm" / "driver.sbatch"


@pytest.fixture(scope="module")
def folder(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    folder = tmp_path_factory.mktemp("by-hand")
    make_demo_dataset(folder / "data", num_samples=48)
    write_config(
        folder, "by-hand", slurm={"time_limit_min": 10, "max_jobs_at_once": 4}, data_profile={"num_shards": 4},
        model_profile={"budget_s": 9, "num_probes": 8, "num_repeats": 1},
        plan={"global_batch_size": 8, "microbatch_choices": [2, 4], "num_scenarios": 2, "top": 4},
    )  # fmt: skip
    make_environment(folder, PYTHONPATH=str(REPO), PREFECT_HOME=str(folder / "prefect"))
    return folder


def submit(folder: Path, *words: str, options: tuple[str, ...] = ()) -> tuple[str, str]:
    """(last state, what it printed) of a command in a job, to its end."""
    log = folder / f"{words[0]}.log"
    command = ["sbatch", "--parsable", f"--output={log}", *options, DRIVER, *words]
    job_id = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    return end_of(job_id, 600), log.read_text()


def rows(folder: Path, sql: str) -> list[tuple]:
    return console.query(folder / "store", sql)[1]


def test_a_dataset_is_profiled_on_the_cores_of_one_node(folder):
    here = ("--set", "cluster.backend=local", "--set", "data_profile.num_shards=1")
    state, said = submit(folder, "data", "profile", "run.yaml", *here, options=("--cpus-per-task=4",))
    assert state == "COMPLETED", said
    ((key,),) = rows(folder, "select profile_key from profile_record where kind = 'data'")
    assert said.splitlines()[-1] == key
    assert rows(folder, "select count(*) from v_sample_shape") == [(48,)]
    (run,) = (folder / "runs").glob("[!.]*")
    assert {r.backend for r in Journal(run, run.name).records()} == {"local"}


def test_a_model_is_profiled_by_arrays_that_the_job_submits(folder):
    state, said = submit(folder, "profile", "run.yaml")
    assert state == "COMPLETED", said
    assert ", reused" in said, "the data profile is there"
    assert rows(folder, "select count(distinct module) from measurement") == [(3,)]
    ids = rows(folder, "select distinct job_id from job_record where job_key like '%/profile/%' and backend = 'slurm'")
    assert len(ids) == 4, "three modules and the links"
    assert len({job_id.split("_")[0] for (job_id,) in ids if "_" in job_id}) == 1


def test_a_plan_is_made_from_what_was_measured(folder):
    state, said = submit(folder, "plan", "run.yaml")
    assert state == "COMPLETED", said
    assert "costs measured on test" in said


def test_jobs_of_a_driver_that_is_cancelled_or_told_to_stop_are_cancelled(folder):
    waiting = ["run.yaml", "--set", "cluster.slurm.extra={hold: ''}", "--set", "store=another"]
    command = ["sbatch", "--parsable", "--mem=900M", DRIVER, "profile", *waiting]
    job_id = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    until(queued, what="the array of the profile", limit_s=180)
    subprocess.run(["scancel", job_id], check=True)
    until(lambda: not queued(), what="an empty queue", limit_s=60)
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    driver = subprocess.Popen([folder / ".venv/bin/dflop", "data", "profile", *waiting], cwd=folder, env=env)
    until(queued, what="the array of the profile", limit_s=180)
    driver.terminate()
    assert driver.wait(60) == 143
    until(lambda: not queued(), what="an empty queue", limit_s=60)


def queued() -> list[str]:
    """Names of this module's jobs that have not ended."""
    names = subprocess.run(["squeue", "-h", "-o", "%j"], capture_output=True, text=True, check=True).stdout.split()
    return [name for name in names if name.startswith("by-hand-")]
