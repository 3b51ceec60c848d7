"""Every command that follows jobs, told to stop by a signal while its jobs wait in a queue, leaves a true record."""

import json
import os
import signal
from pathlib import Path

import pytest

from dflop.launch import JobState
from dflop.run.directory import RunDir
from dflop.run.status import jobs_of
from dflop.store.console import query
from tests.jobs.configs import write_demo_config
from tests.launch import fake_slurm
from tests.launch.helpers import Background
from tests.test_cli import python_path


@pytest.mark.parametrize(
    ("command", "number"),
    [
        (("data", "profile"), signal.SIGTERM), (("data", "profile"), signal.SIGINT),
        (("data", "profile"), signal.SIGHUP),
        (("profile",), signal.SIGTERM), (("plan", "--device=h100"), signal.SIGTERM),
        (("compare", "--device=h100"), signal.SIGTERM), (("train",), signal.SIGHUP),
    ],
)  # fmt: skip
def test_a_driver_that_is_told_to_stop_leaves_no_job_and_notes_each_as_cancelled(
    tmp_path: Path, command: tuple[str, ...], number: signal.Signals
):
    write_demo_config(
        tmp_path, 24, "cluster.backend=slurm", "cluster.hardware=x", "cluster.slurm.extra={hold: ''}",
        "cluster.slurm.poll_interval_s=0.1", "data_profile.num_shards=2",
    )  # fmt: skip
    bin_folder = fake_slurm.install(tmp_path / "slurm")
    env = {"PYTHONPATH": python_path(), "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    driver = Background("dflop.cli", *command, "run.yaml", log=tmp_path / "log", cwd=tmp_path, **env)

    def states() -> list[str]:
        return [json.loads(path.read_text())["state"] for path in (tmp_path / "slurm/jobs").glob("*")]

    try:
        driver.shows(lambda: states() if len(states()) >= 2 else None, what="jobs in the queue", limit_s=120)
        assert set(states()) == {"PENDING"}, driver.output
        driver.process.send_signal(number)
        said = driver.ends(128 + number, 60)
    finally:
        driver.kill()
    assert set(states()) == {"CANCELLED"}
    (run,) = (tmp_path / "runs").glob("small-*")
    assert json.loads((run / "run.json").read_text())["state"] == "interrupted"
    what, where = said.splitlines()[-2:]
    number_of_jobs = f"{len(jobs_of(RunDir(run)))} job{'s' * (len(jobs_of(RunDir(run))) > 1)}"
    goes_on = "the same command resumes from the profiles and plans that are there"
    assert what == f"dflop: interrupted by {number.name}: {number_of_jobs} cancelled; {goes_on}"
    assert where == f"  where: {run}"
    assert {job.state for job in jobs_of(RunDir(run))} == {JobState.CANCELLED}
    _, rows = query(tmp_path / "store", "select state, count(*) from v_job group by all")
    assert rows == [("cancelled", len(jobs_of(RunDir(run))))]
