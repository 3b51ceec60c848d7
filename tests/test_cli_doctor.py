"""`dflop doctor` as a person meets it: its own process, a line or an object per finding, its exit code."""

import json
from pathlib import Path

import pytest

from tests.doctor.test_profile_store import overwrite
from tests.jobs.configs import make_dataset, write_config
from tests.store.asking import fill
from tests.store.conftest import Make
from tests.test_cli import dflop


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_dataset(tmp_path)
    write_config(tmp_path)
    fill(tmp_path / "store", Make.run())
    return tmp_path


def doctor(folder: Path, *arguments: str, exit_code: int = 0, **env: str) -> dict[tuple[str, str], dict[str, str]]:
    """Findings by (area, name)."""
    given = {"PREFECT_API_URL": "", "PREFECT_HOME": str(folder / "prefect"), "DFLOP_STORE": str(folder / "store")}
    done = dflop("doctor", *arguments, "--json", cwd=folder, **(given | env))
    assert "Traceback" not in done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == exit_code, rows
    return {(row["area"], row["name"]): row for row in rows}


def test_a_sound_installation_is_told_line_by_line(folder):
    env = {"PREFECT_API_URL": "", "PREFECT_HOME": str(folder / "prefect"), "NO_COLOR": "1", "PATH": "/nowhere"}
    done = dflop("doctor", "run.yaml", cwd=folder, **env)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    for heading in ("packages", "configuration", "machine", "Slurm", "Prefect", "store", "files"):
        assert heading in lines
    assert "  ok   run.yaml: run.yaml: ok" in lines
    assert "  skip commands: not on PATH: sbatch, srun, squeue, scancel, scontrol, sinfo" in lines
    assert lines[-1].split(",")[0].endswith(" ok")
    assert " fail" not in done.stdout


def test_a_broken_store_fails_and_says_what_to_do(folder):
    overwrite(folder / "store" / "live" / "dflop.duckdb")
    overwrite(folder / "store" / "snapshots" / "dflop-000001.duckdb")
    found = doctor(folder, exit_code=1)
    assert found["store", "snapshot"]["status"] == "fail"
    assert "dflop store rebuild" in found["store", "live database"]["advice"]
    assert dflop("store", "rebuild", "--store", folder / "store", cwd=folder).returncode == 0
    quiet = dflop("doctor", "-q", cwd=folder, PREFECT_API_URL="", PREFECT_HOME=str(folder / "prefect"))
    assert quiet.returncode == 0, quiet.stdout
    assert "  ok " not in quiet.stdout
    assert "  skip" not in quiet.stdout


def test_what_is_wrong_with_a_configuration_is_among_the_findings(folder):
    found = doctor(folder, "run.yaml", "--set=train.num_stpes=3", exit_code=1)
    assert found["configuration", "--set train.num_stpes"]["status"] == "fail"
    assert ("store", "snapshot") in found  # the rest is looked at all the same


def test_trial_jobs_need_a_cluster(folder):
    done = dflop("doctor", "run.yaml", "--try", cwd=folder)
    assert (done.returncode, "--try needs a configuration" in done.stderr) == (2, True)
