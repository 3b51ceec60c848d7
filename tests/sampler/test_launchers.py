"""Lightning's own launcher and torchrun, with a sampler that was made before they said who is which rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN = [sys.executable, "-m", "tests.sampler.lightning_ranks"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m",
            "tests.sampler.lightning_ranks"]  # fmt: skip


def assert_every_sample_once(folder: Path) -> None:
    files = [folder / f"seen-{rank}.json" for rank in range(2)]
    assert sorted(i for file in files for i in json.loads(file.read_text())) == list(range(32))


@pytest.mark.lane("jobs")
@pytest.mark.parametrize("launcher", [OWN, TORCHRUN], ids=["its own", "torchrun"])
def test_every_sample_is_trained_once(launcher, tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(
        [*launcher, str(tmp_path)], cwd=ROOT, env={**env, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert_every_sample_once(tmp_path)
