"""`dflop doctor` as a person meets it: its own process; with and without Slurm, a broken store, a wrong server."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dflop.store.ingest import ingest
from tests.jobs.configs import make_dataset, write_config
from tests.jobs.doctor.test_profile_store import overwrite, write
from tests.test_cli import dflop


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_dataset(tmp_path)
    write_config(tmp_path)
    write(tmp_path / "store")
    ingest(tmp_path / "store")
    return tmp_path


def doctor(folder: Path, *arguments: str, exit_code: int = 0, **env: str) -> dict[tuple[str, str], dict[str, str]]:
    """Findings by (area, name)."""
    given = {"PREFECT_API_URL": "", "PREFECT_HOME": str(folder / "prefect"), "DFLOP_STORE": str(folder / "store")}
    done = dflop("doctor", *arguments, "--json", cwd=folder, **(given | env))
    assert "Traceback" not in done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == exit_code, rows
    return {(row["area"], row["name"]): row for row in rows}


def commands_in(folder: Path, **scripts: str) -> str:
    """A PATH with stand-ins for clients before what there is."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, script in scripts.items():
        path = folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    return f"{folder / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin"


def test_a_sound_installation_is_told_line_by_line(folder):
    env = {"PREFECT_API_URL": "", "PREFECT_HOME": str(folder / "prefect"), "NO_COLOR": "1", "PATH": "/nowhere"}
    done = dflop("doctor", "run.yaml", cwd=folder, **env)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    for heading in ("packages", "configuration", "machine", "Slurm", "Prefect", "store", "files"):
        assert heading in lines
    assert "  ok   run.yaml: run.yaml: nothing wrong with it" in lines
    assert "  skip commands: not on PATH: sbatch, srun, squeue, scancel, scontrol, sinfo" in lines
    assert lines[-1].split(",")[0].endswith(" ok")
    assert " fail" not in done.stdout
    quiet = dflop("doctor", "run.yaml", "-q", cwd=folder, **env).stdout
    assert "  ok " not in quiet
    assert "  skip" not in quiet


def test_slurm_clients_that_know_no_cluster(folder):
    fatal = "echo 'fatal: Could not establish a configuration source' >&2; exit 1"
    path = commands_in(folder, **dict.fromkeys(("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo"), fatal))
    found = doctor(folder, PATH=path)
    assert [name for area, name in found if area == "Slurm"] == ["commands"]
    assert found["Slurm", "commands"]["status"] == "warn"
    found = doctor(
        folder, "run.yaml", "--set=cluster.backend=slurm", "--set=cluster.hardware=x", exit_code=1, PATH=path
    )
    assert found["Slurm", "commands"]["status"] == "fail"


def test_a_broken_store_fails_and_says_what_to_do(folder):
    overwrite(folder / "store" / "live" / "dflop.duckdb")
    overwrite(folder / "store" / "snapshots" / "dflop-000001.duckdb")
    found = doctor(folder, exit_code=1)
    assert found["store", "snapshot"]["status"] == "fail"
    assert "dflop store rebuild" in found["store", "live database"]["advice"]
    assert dflop("store", "rebuild", "--store", folder / "store", cwd=folder).returncode == 0
    found = doctor(folder)
    assert found["store", "snapshot"]["status"] == found["store", "live database"]["status"] == "ok"


def test_a_wrong_prefect_url_fails_and_says_what_to_do(folder):
    found = doctor(folder, exit_code=1, PREFECT_API_URL="http://127.0.0.1:9/api")
    finding = found["Prefect", "server"]
    assert "does not answer: [Errno 111] Connection refused" in finding["detail"]
    assert "unset PREFECT_API_URL" in finding["advice"]


def test_what_is_wrong_with_a_configuration_is_among_the_findings(folder):
    found = doctor(folder, "run.yaml", "--set=train.num_stpes=3", exit_code=1)
    assert found["configuration", "--set train.num_stpes"]["status"] == "fail"
    assert ("store", "snapshot") in found  # the rest is looked at all the same
    found = doctor(folder, "run.yaml", "--set=dataset.media_root=nowhere", exit_code=1)
    assert "`nowhere` does not exist" in found["configuration", "--set dataset.media_root"]["detail"]
    found = doctor(folder, "none.yaml", exit_code=1)
    assert "cannot read" in found["configuration", "none.yaml"]["detail"]


def test_a_gpu_is_missed_only_by_a_configuration_that_wants_one(folder):
    path = commands_in(folder, **{"nvidia-smi": "exit 9"})
    assert doctor(folder, PATH=path)["machine", "GPUs"]["status"] == "skip"
    found = doctor(folder, "run.yaml", "--set=cluster.device=cuda", exit_code=1, PATH=path)
    assert found["machine", "GPUs"]["status"] == "fail"
