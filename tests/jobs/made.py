"""Run directories as drivers leave them, without any driver."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dflop.config import Config, dump_config
from dflop.files import TMP_PREFIX
from dflop.launch import JobHandle, JobState, JobStatus, Journal
from dflop.run import lifecycle
from dflop.run.directory import RunDir
from dflop.train.manifest import INDEX, name_of, publish
from tests.jobs.configs import make_config


def run_of(path: Path, config: Config) -> RunDir:
    """A run directory with its configuration and nothing else."""
    run = RunDir(path)
    run.path.mkdir(parents=True, exist_ok=True)
    run.config_file.write_text(dump_config(config))
    return run


def make_run(
    folder: Path, run_id: str = "small-1", state: str = lifecycle.READY, *overrides: str, **facts: Any
) -> RunDir:
    """A run of the configuration of `make_config(folder)`; `facts` replace what run.json says."""
    config = make_config(folder, *overrides)
    run = run_of(folder / "runs" / run_id, config)
    known = {"run_id": run_id, "config_key": config.key, "num_steps": 40, "backend": config.cluster.backend}
    run.write_state({**known, "state": state, **facts})
    return run


def begun_at(run: RunDir, at_s: float) -> RunDir:
    """The same run, begun at another time."""
    os.utime(run.config_file, (at_s, at_s))
    return run


def add_job(
    run: RunDir, name: str, *states: JobState, job_id: str = "", backend: str = "local", num_tasks: int = 1
) -> JobHandle:
    """A job in the journal, submitted and then in each of the states."""
    journal = Journal(run.path, run.run_id)
    folder = run.job_folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    handle = JobHandle(
        backend, job_id or f"id-{name}", f"{run.run_id}-{name}", f"{run.run_id}/{name}", folder, num_tasks, 5.0
    )
    journal.submitted(handle)
    for state in states:
        journal.changes([(handle, JobStatus(state, "for a reason" if state is JobState.FAILED else ""))])
    return handle


def save_step(run: RunDir, next_step: int, **said: Any) -> None:
    """As if a checkpoint of so many steps were the newest one; `said`: what the run says of it."""
    temporary = run.checkpoints / f"{TMP_PREFIX}{next_step}"
    temporary.mkdir(parents=True)
    (temporary / INDEX).touch()
    publish(temporary, {"next_step": next_step, "name": name_of(next_step), **said}, {INDEX: (0, 0)}, keep=2)
