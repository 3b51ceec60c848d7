from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_a_small_array_is_submitted_and_watched_and_nothing_is_lost(tmp_path):
    figures = tmp_path / "launch.json"
    command = [sys.executable, "-m", "tests.bench.launch", "--num-jobs=6", "--duration-s=2", f"--json={figures}"]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    submit, watch = json.loads(figures.read_text())["figures"]
    assert submit["note"].endswith("1 sbatch, 1 scontrol")
    assert "6 done, 0 lost" in watch["note"]
    assert not list(tmp_path.glob("dflop-bench-*"))
