"""What would be submitted is what is submitted: both are rendered by the same code, and nothing is written."""

import os
from pathlib import Path

import pytest

from dflop.config import Config, load_config
from dflop.errors import ConfigError, LaunchError
from dflop.launch.results import payload_of
from dflop.records import LLM
from dflop.run import lifecycle
from dflop.run.queue import launcher_of
from dflop.steps import submit
from dflop.steps.dry_run import dry_run, script_by_hand
from tests.builders import make_plan
from tests.jobs.configs import make_config
from tests.jobs.made import save_step
from tests.launch import fake_slurm


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(tmp_path)
    return make_config(
        tmp_path, "cluster.backend=slurm", "cluster.num_nodes=2", "cluster.slurm.account=a1", "dataset.demo=true",
        "data_profile.num_shards=3",
    )  # fmt: skip


def test_every_job_of_a_run_that_has_not_begun(config, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    found = dry_run(config)
    assert sorted(tmp_path.rglob("*")) == before, "a dry run leaves nothing behind"
    assert not found.is_resumed
    names = [job.name.removeprefix(f"{found.run_id}-") for job in found.jobs]
    assert names == ["data", "profile-tp1", "profile-links", "train", "compare"]
    assert all(job.script.name == "job.sbatch" and str(job.script).startswith(str(config.runs)) for job in found.jobs)
    assert all("#SBATCH --account=a1\n" in job.text for job in found.jobs)
    assert "#SBATCH --array=0-2%3\n" in found.jobs[0].text
    assert "DATA_PROFILE_KEY" in found.jobs[0].text
    train = found.jobs[3].text
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n" in train
    assert any("placeholders" in note for note in found.notes)
    assert any("whole cluster" in note for note in found.notes)
    (tmp_path / "resolved.yaml").write_text(found.config)
    assert load_config(tmp_path / "resolved.yaml").cluster == config.cluster
    here = dry_run(make_config(tmp_path, "dataset.demo=true", "compare.num_batches=0"))
    assert all(job.script is None for job in here.jobs)
    assert here.jobs[-1].text.startswith(f"{here.run_id}-train: 4 processes of this machine, each runs dflop.jobs.")


def test_a_run_with_a_plan_shows_what_it_submits_next(config, tmp_path, monkeypatch):
    run, _ = lifecycle.begin(config)
    run.write_plan(make_plan({"vision": 1, LLM: 1}), [])
    found = dry_run(config)
    assert (found.is_resumed, found.run_id) == (True, run.run_id)
    shown = next(job for job in found.jobs if job.name == f"{run.run_id}-train")
    assert "#SBATCH --ntasks-per-node=2\n" in shown.text
    monkeypatch.setenv("PATH", f"{fake_slurm.install(tmp_path / 'slurm')}:{os.environ['PATH']}")
    spec = submit.train_job(run, run.config(), "train", run.plan().num_processes)
    launcher = launcher_of(run, run.config())
    launcher.cancel(launcher.submit(spec))
    with fake_slurm.Jobs(tmp_path / "slurm") as jobs:
        (job,) = jobs.values()
    assert job["script"] == shown.text
    assert shown.script.exists()


def test_the_script_that_a_person_submits_is_the_drivers_with_what_it_runs(config):
    run, _ = lifecycle.begin(config)
    run.write_plan(make_plan({"vision": 1, LLM: 1}), [])
    shown = next(job for job in dry_run(config).jobs if job.name == f"{run.run_id}-train")
    script = script_by_hand(run, "train")
    assert script == run.path / "jobs/train/by_hand/job.sbatch"
    text = shown.text.replace("\nagain=\n", "\nagain=by_hand.pkl\n")
    assert script.read_text() == text.replace("jobs/train/0", "jobs/train/by_hand")
    assert next(job for job in dry_run(config).jobs if job.name == shown.name) == shown, "drivers do not use its folder"
    payload = payload_of(script.with_name("by_hand.pkl"))
    assert (payload.spec.entry, payload.spec.args) == ("dflop.jobs.train:main", (str(run.path), "train"))
    assert script_by_hand(run, "train") == script
    assert script_by_hand(run, "compare").parts[-3] == "compare"


def test_what_cannot_be_trained_by_hand_is_refused_with_what_to_do(config, tmp_path):
    run, _ = lifecycle.begin(config)
    with pytest.raises(ConfigError, match="the run has no plan yet") as caught:
        script_by_hand(run, "train")
    assert caught.value.hint == f"dflop train {run.run_id} makes one"
    run.write_plan(make_plan({"vision": 1, LLM: 1}), [])
    save_step(run, config.train.num_steps)
    with pytest.raises(ConfigError, match="nothing is left to train"):
        script_by_hand(run, "train")
    here, _ = lifecycle.begin(make_config(tmp_path, "dataset.demo=true"))
    with pytest.raises(LaunchError, match="processes of this machine: there is no script to submit"):
        script_by_hand(here, "train")
