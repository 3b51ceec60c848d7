"""The sampler under srun on two nodes, made before Lightning knows of the other one."""

import subprocess
import sys
from pathlib import Path

from tests.sampler.test_launchers import assert_every_sample_once


def test_lightning_on_two_nodes_trains_every_sample_once(cluster, tmp_path):
    command = ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", sys.executable, "-m",
               "tests.sampler.test_launchers", str(tmp_path), "2"]  # fmt: skip
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_every_sample_once(tmp_path)
