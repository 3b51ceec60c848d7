"""Which run a person means: its directory, its id, the beginning of one, or `latest`."""

from __future__ import annotations

import os
from pathlib import Path

from dflop.errors import ConfigError, did_you_mean
from dflop.run.directory import RunDir

LATEST = "latest"
_MAX_SHOWN = 5


def runs_folder() -> Path:
    """Where runs are when neither a configuration nor an option says so: DFLOP_RUNS, else `runs`."""
    return Path(os.environ.get("DFLOP_RUNS") or "runs")


def all_runs(runs: Path) -> list[RunDir]:
    """Every run in a folder, the one that began last first."""
    found = [RunDir(path) for path in runs.absolute().iterdir()] if runs.is_dir() else []
    begun = [(run.config_file.stat().st_mtime_ns, run.run_id, run) for run in found if run.config_file.is_file()]
    return [run for _, _, run in sorted(begun, key=lambda one: one[:2], reverse=True)]


def find_run(name: str, runs: Path) -> RunDir:
    """The run that a person means by a directory, the id of a run in a folder, the beginning of one, or `latest`.

    Raises:
        ConfigError: none is meant, or several are.
    """
    here = RunDir(Path(name).absolute())
    if os.path.isfile(here.config_file):  # not Path.is_file, which raises where no file can have that name
        return here
    known = all_runs(runs)
    if name == LATEST:
        for run in known:
            if run.state().get("trains", True):  # not for a profile or a plan alone
                return run
        raise ConfigError("no runs yet", where=str(runs), hint="dflop run CONFIG, or --runs FOLDER")
    found = [run for run in known if run.run_id == name] or [run for run in known if run.run_id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        shown = ", ".join(run.run_id for run in found[:_MAX_SHOWN]) + ", ..." * (len(found) > _MAX_SHOWN)
        raise ConfigError(f"{len(found)} runs begin with `{name}`", where=str(runs), hint=f"choose one of {shown}")
    hint = did_you_mean(name, [LATEST, *(run.run_id for run in known[:20])])
    raise ConfigError(f"no run and no run directory `{name}`", where=str(runs), hint=hint)
