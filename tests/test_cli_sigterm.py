"""Every command that follows jobs, told to stop by SIGTERM while its jobs wait in a queue, leaves none behind."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.jobs.configs import write_demo_config
from tests.launch import fake_slurm
from tests.launch.helpers import Background
from tests.test_cli import python_path


@pytest.mark.parametrize(
    "command", [("data", "profile"), ("profile",), ("plan", "--device=h100"), ("compare", "--device=h100")]
)
def test_a_driver_that_is_told_to_stop_leaves_no_job(tmp_path: Path, command: tuple[str, ...]):
    write_demo_config(
        tmp_path, 24, "cluster.backend=slurm", "cluster.hardware=x", "cluster.slurm.extra={hold: ''}",
        "cluster.slurm.poll_interval_s=0.1", "data_profile.num_shards=2",
    )  # fmt: skip
    bin_folder = fake_slurm.install(tmp_path / "slurm")
    env = {"PYTHONPATH": python_path(), "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    driver = Background("dflop.cli", *command, "run.yaml", log=tmp_path / "log", cwd=tmp_path, **env)

    def states() -> list[str]:
        return [json.loads(path.read_text())["state"] for path in (tmp_path / "slurm/jobs").iterdir()]

    try:
        driver.hears("is queued", 120)
        assert states() == ["PENDING"] * 2, driver.output
        driver.process.send_signal(signal.SIGTERM)
        driver.ends(143, 60)
    finally:
        driver.kill()
    assert states() == ["CANCELLED"] * 2
    (run,) = (tmp_path / "runs").glob("small-*")
    assert json.loads((run / "run.json").read_text())["state"] == "interrupted"
