"""Which run a person means: its directory, its id, the beginning of one, or `latest`.

A team may share a folder of runs. A run is opened only where its directory belongs to this user and nobody else may
write to it: its configuration has shell lines and its job folders have pickles, which would run as whoever opens it.
Runs of others, copies and damaged ones are left out wherever a run is chosen, and refused by name, with the reason.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from dflop.errors import ConfigError, did_you_mean
from dflop.files import user_name
from dflop.run.directory import RunDir

LATEST = "latest"
_MAX_SHOWN = 5


def runs_folder() -> Path:
    """Where runs are when neither a configuration nor an option says so: DFLOP_RUNS, else `runs`."""
    return Path(os.environ.get("DFLOP_RUNS") or "runs")


def this_user() -> str:
    """Who begins runs in this process, as runs record it: `user@host`."""
    return f"{user_name(os.geteuid())}@{socket.gethostname()}"


def all_runs(runs: Path) -> list[RunDir]:
    """Every run of this user in a folder, the one that began last first."""
    return look_into(runs)[0]


def look_into(runs: Path) -> tuple[list[RunDir], dict[str, str]]:
    """(this user's runs in a folder, the one that began last first; by name, why others are left out).

    Raises:
        ConfigError: the folder cannot be read.
    """
    begun, left_out = dict[RunDir, tuple[int, str]](), dict[str, str]()
    try:
        names = sorted(os.listdir(runs.absolute())) if os.path.isdir(runs) else []
    except OSError as error:
        hint = f"it belongs to {user_name(os.stat(runs).st_uid)}; name another folder of runs"
        raise ConfigError(f"cannot list the runs: {error.strerror}", where=str(runs), hint=hint) from None
    for name in names:
        path = runs.absolute() / name
        if name.startswith(".") or not _may_be_run(path):
            continue
        if os.path.islink(path) and os.stat(path).st_uid == os.lstat(path).st_uid == os.geteuid():
            path = path.resolve()  # a run that its owner moved and linked has the name of its directory
        if problem := problem_of(path):
            if os.path.lexists(path):  # else it was removed meanwhile
                left_out[name] = problem
        else:
            run = RunDir(path)
            begun[run] = os.stat(run.config_file).st_mtime_ns, run.run_id
    return sorted(begun, key=begun.__getitem__, reverse=True), left_out


def problem_of(path: Path) -> str:
    """Why a directory is no run that this user can open; empty where it is one."""
    run, me = RunDir(path), os.geteuid()
    try:
        link, facts = os.lstat(path), os.stat(path)
        if link.st_uid != me:
            return f"it is {'a symbolic link' if stat.S_ISLNK(link.st_mode) else 'a run'} of {user_name(link.st_uid)}"
        if facts.st_uid != me:
            return f"it belongs to {user_name(facts.st_uid)}"
        if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = f"{stat.S_IMODE(facts.st_mode):o}"
            return f"others may write to it (mode {mode}); if they have not, `chmod go-w {path}`"
        if not stat.S_ISREG(os.stat(run.config_file).st_mode):
            return f"{run.config_file.name} is no file"
        state = run.state()
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except ConfigError as error:
        return error.what
    if (run_id := state.get("run_id", run.run_id)) != run.run_id:
        return f"it is run `{run_id}` under another name; rename it back, or remove it if it is a copy"
    original = state.get("run_dir", str(path))
    if os.path.isdir(original) and not os.path.samefile(original, path):
        return f"it is a copy of {original}; use that one, or begin another run"
    return ""


def left_out_text(left_out: Mapping[str, str]) -> str:
    """What a person should know about entries that are left out; empty where there are none."""
    shown = [f"{name}: {problem}" for name, problem in left_out.items()][:_MAX_SHOWN]
    more = f"; and {len(left_out) - _MAX_SHOWN} more" if len(left_out) > _MAX_SHOWN else ""
    return f"left out: {'; '.join(shown)}{more}" if shown else ""


def find_run(name: str, runs: Path) -> RunDir:
    """The run that a person means by a directory, the id of a run in a folder, the beginning of one, or `latest`.

    Raises:
        ConfigError: none is meant, several are, or it is no run of this user.
    """
    here = Path(name).absolute()
    is_path = os.sep in name and os.path.lexists(here)
    if is_path or os.path.lexists(RunDir(here).config_file):  # not Path.exists, which raises where no file can be
        return _opened(name, here)
    known, left_out = look_into(runs)
    if name == LATEST:
        for run in known:
            if run.state().get("trains", True):  # not for a profile or a plan alone
                return run
        hint = left_out_text(left_out) or "dflop run CONFIG, or --runs FOLDER"
        raise ConfigError("no runs yet", where=str(runs), hint=hint)
    found = [run for run in known if run.run_id == name] or [run for run in known if run.run_id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        shown = ", ".join(run.run_id for run in found[:_MAX_SHOWN]) + ", ..." * (len(found) > _MAX_SHOWN)
        raise ConfigError(f"{len(found)} runs begin with `{name}`", where=str(runs), hint=f"choose one of {shown}")
    if name in left_out:
        return _opened(name, runs.absolute() / name)
    if os.path.isdir(here):
        return _opened(name, here)
    hint = did_you_mean(name, [LATEST, *(run.run_id for run in known[:20])])
    raise ConfigError(f"no run and no run directory `{name}`", where=str(runs), hint=hint)


def _opened(name: str, path: Path) -> RunDir:
    if problem := problem_of(path):
        raise ConfigError(f"cannot open run `{name}`: {problem}", where=str(path))
    return RunDir(path)


def _may_be_run(path: Path) -> bool:
    """A directory that is a run, was one, or cannot be looked into."""
    if not os.path.isdir(path):
        return False
    try:
        return bool({"run.json", RunDir(path).config_file.name}.intersection(os.listdir(path)))
    except OSError:
        return True
