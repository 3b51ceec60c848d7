"""Trial jobs against a Slurm that is none, and what is made of what tasks saw; tests/slurm has a real one."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dflop import __version__
from dflop.doctor.finding import FAIL, OK, WARN
from dflop.doctor.trial import SKEW_S, _judged, trial
from dflop.launch import Resources
from dflop.launch.commands import job_environment
from tests.jobs.configs import make_config, make_dataset
from tests.launch import fake_slurm
from tests.launch.helpers import make_spec


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "slurm"
    monkeypatch.setenv("PATH", f"{fake_slurm.install(folder)}:{os.environ['PATH']}")
    return folder


def config_of(folder: Path, *more: str):
    make_dataset(folder)
    sound = ("backend=slurm", "num_nodes=1", "num_processes_per_node=2", "hardware=x", "memory_per_process_gib=0.9")
    return make_config(folder, "data_profile.num_workers=2", *(f"cluster.{override}" for override in (*sound, *more)))


def test_each_shape_of_job_runs_once_is_signalled_and_leaves_nothing(slurm, tmp_path):
    config = config_of(tmp_path)
    found = {f.name: f for f in trial(config, poll_interval_s=0.1)}
    assert {f.status for f in found.values()} == {OK}, found
    assert list(found) == ["submitted", "data-0", "profile-tp1", "profile-links"], "training is shaped like links"
    assert found["profile-links"].detail.startswith("2 tasks on ")
    assert list(config.runs.iterdir()) == []
    assert fake_slurm.answer(slurm, ["squeue"]).stdout == ""


def test_what_a_sites_plugin_changes_is_named_and_the_jobs_are_followed(slurm, tmp_path):
    (slurm / "lua").touch()
    found = [f for f in trial(config_of(tmp_path), poll_interval_s=0.1) if f.name.startswith("data-0")]
    assert [(f.name, f.status) for f in found] == [("data-0: options", WARN), ("data-0", OK)]
    assert "-data-0 is proj42-.doctor-" in found[0].detail
    assert found[0].detail.endswith("TimeLimit 5 min is 00:01:00")


def test_a_job_that_would_never_start_is_cancelled_and_told(slurm, tmp_path):
    (slurm / "never").touch()
    found = {f.name: f for f in trial(config_of(tmp_path, "slurm.extra={hold: ''}"), poll_interval_s=0.1)}
    assert found["data-0"].status == FAIL
    assert found["data-0"].detail.startswith("PartitionTimeLimit: it will never start, its time limit is above")
    assert fake_slurm.answer(slurm, ["squeue"]).stdout == ""


def test_a_refusal_is_a_finding(slurm, tmp_path):
    (slurm / "refuse").write_text("sbatch: error: QOSMaxWallDurationPerJobLimit")
    (found,) = trial(config_of(tmp_path))
    assert (found.status, found.advice) == (FAIL, "check cluster.slurm.time_limit_min")


@pytest.mark.parametrize(
    ("changed", "ahead_s", "name", "status", "words"),
    [
        ({"num_gpus": 1}, 0, "GPUs", FAIL, "rank 1 on n1 is number 1 on its node and sees 1 GPUs"),
        ({"missing": ["/data/a"]}, 0, "folders", FAIL, "rank 0 on n1 does not see /data/a"),
        ({"version": "0.0"}, 0, "dflop", FAIL, "rank 0 on n1 has dflop 0.0"),
        ({"is_signalled": False}, 0, "signal", WARN, "SIGUSR2 did not reach ranks 0, 1"),
        ({"variables": []}, 0, "environment", WARN, "PATH"), ({}, -SKEW_S - 240, "clocks", WARN, "differ by 5 min"),
        ({"host": "n2"}, 0, "nodes", FAIL, ""), ({}, SKEW_S - 1, "", OK, "2 tasks on n1"),
    ],
)  # fmt: skip
def test_what_tasks_saw(tmp_path, changed, ahead_s, name, status, words):
    resources = Resources(tasks_per_node=2, gpus_per_node=2, num_nodes=2 if "host" in changed else 1)
    spec = replace(make_spec(tmp_path, "report"), resources=resources)
    task = {
        "host": "n1", "python": "/p", "version": __version__, "variables": sorted(job_environment(os.environ)),
        "missing": [], "shares_tmp": False, "num_gpus": 2, "is_signalled": True, **changed,
    }  # fmt: skip
    found = list(_judged("train", spec, [{**task, "rank": n, "local_rank": n} for n in range(2)], ahead_s))
    assert (found[0].name, found[0].status) == (f"train: {name}" if name else "train", status)
    assert words in found[0].detail
    assert found[-1].status == OK
