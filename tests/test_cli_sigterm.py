"""Every command that follows jobs, told to stop by SIGTERM while its jobs wait in a queue, leaves none behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.configs import write_demo_config
from tests.launch import fake_slurm
from tests.launch.helpers import until
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
    env = {**os.environ, "PYTHONPATH": python_path(), "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    with (tmp_path / "log").open("w") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", "dflop.cli", *command, "run.yaml"], cwd=tmp_path, env=env, stdout=log, stderr=log
        )
    said = (tmp_path / "log").read_text

    def states() -> list[str]:
        return [json.loads(path.read_text())["state"] for path in (tmp_path / "slurm/jobs").iterdir()]

    try:
        until(lambda: driver.poll() is not None or "is queued" in said(), what="jobs in the queue", limit_s=120)
        assert states() == ["PENDING"] * 2, said()
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(60) == 143, said()
    finally:
        driver.kill()
    assert states() == ["CANCELLED"] * 2
    assert "Traceback" not in said()
    (run,) = (tmp_path / "runs").glob("small-*")
    assert json.loads((run / "run.json").read_text())["state"] == "interrupted"
