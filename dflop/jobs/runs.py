"""Begin, resume and end runs: which directory a configuration belongs to, and what the store knows about it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

from dflop.config import Config, dump_config
from dflop.errors import LaunchError
from dflop.jobs.rundir import RunDir, write_atomically
from dflop.launch import Journal
from dflop.launch.process import ProcessId
from dflop.profile.hardware import hardware_name, software_name
from dflop.records import RunRecord
from dflop.store.spool import SpoolWriter

RUNNING, DONE, FAILED, INTERRUPTED = "running", "done", "failed", "interrupted"


def begin(config: Config) -> tuple[RunDir, bool]:
    """The run directory for `config`: the newest unfinished run of the same configuration, else a new one.

    Returns:
        The directory and whether an earlier run is being resumed.

    Raises:
        LaunchError: that run is being driven by another live process of this host.
    """
    check_free(config)
    found = unfinished(config)
    if found is not None:
        return found, True
    run = RunDir(_new_folder(config.runs.absolute(), f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"))
    write_atomically(run.config_file, dump_config(_absolute(config)))
    return run, False


def _new_folder(parent: Path, name: str) -> Path:
    """A folder nobody else has: runs of several configurations may begin within one second."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(mode=0o700)
            return folder
        except FileExistsError:
            number += 1


def unfinished(config: Config) -> RunDir | None:
    """The newest run of the same configuration that has not ended well."""
    folder = config.runs.absolute()
    runs = [RunDir(p) for p in sorted(folder.iterdir(), reverse=True)] if folder.is_dir() else []
    for run in runs:
        state = run.state()
        if state.get("config_key") == config.key and state.get("state") != DONE:
            return run
    return None


def note(run: RunDir, config: Config, state: str, *, config_key: str) -> None:
    """Record a change of state in run.json and in the spool."""
    me = ProcessId.of(os.getpid())
    driver = {"host": socket.gethostname(), "pid": os.getpid(), "start_ticks": me.start_ticks if me else 0}
    run.write_state({"run_id": run.run_id, "config_key": config_key, "state": state, "driver": driver})
    hardware = config.cluster.hardware
    with SpoolWriter(config.store, run.run_id, "flow") as spool:
        spool.append(
            RunRecord(
                run_id=run.run_id,
                name=config.name,
                config_key=config_key,
                state=state,
                hardware=hardware_name("cpu") if hardware == "auto" and config.cluster.device == "cpu" else hardware,
                software=software_name(),
                code_rev=code_revision(),
                run_dir=str(run.path),
                observed_at_s=time.time(),
            )
        )


def check_free(config: Config) -> None:
    """Refuse to take up a run that somebody else is at; `dflop run` asks before it starts a server.

    Raises:
        LaunchError: the unfinished run of this configuration is driven by another live process of this host.
    """
    run = unfinished(config)
    state = run.state() if run else {}
    driver = state.get("driver", {})
    if (
        run is None
        or state.get("state") != RUNNING
        or driver.get("host") != socket.gethostname()
        or driver.get("pid") == os.getpid()
    ):
        return
    if ProcessId(driver["pid"], driver["start_ticks"]).is_alive:
        raise LaunchError(
            f"run `{run.run_id}` of this configuration is being driven by process {driver['pid']}",
            where=str(run.path),
            hint="wait for it, stop it, or give the second run another `name`",
        )


def spool_journal(run: RunDir, config: Config) -> None:
    """Spool the entries of the job journal that were not spooled before."""
    mark = run.path / "jobs.spooled"
    num_spooled = int(mark.read_text()) if mark.exists() else 0
    records = Journal(run.path, run.run_id).records()
    with SpoolWriter(config.store, run.run_id, "journal") as spool:
        for record in records[num_spooled:]:
            spool.append(record)
    write_atomically(mark, str(len(records)))


def code_revision() -> str:
    """Commit of the checkout dflop runs from, with `-dirty` when it was changed; the version outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        from dflop import __version__

        return f"v{__version__}"
    return found.stdout.strip()


def _absolute(config: Config) -> Config:
    """The same configuration with absolute paths: jobs may start in another working directory."""
    dataset, metrics_dir = config.dataset, config.train.metrics_dir
    paths = {name: getattr(dataset, name).absolute() for name in ("annotations", "media_root", "tokenizer")}
    return config.model_copy(
        update={
            "dataset": dataset.model_copy(update=paths),
            "store": config.store.absolute(),
            "runs": config.runs.absolute(),
            "train": config.train.model_copy(update={"metrics_dir": metrics_dir.absolute() if metrics_dir else None}),
        }
    )
