"""What a run would submit, to the letter, without submitting anything: the resolved configuration and every job.

What is not known before the run has come that far is said, and a stand-in takes its place: the key of a profile whose
dataset is not there yet, the number of processes of a plan that is not made.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dflop.config import Config, dump_config
from dflop.data.profile import profile_key
from dflop.errors import DflopError, StoreError
from dflop.jobs import planning, runs, submit
from dflop.jobs.rundir import RunDir, dataset_ref, rules_of
from dflop.jobs.steps import COMPARE, TRAIN
from dflop.jobs.watching import Say
from dflop.launch import JobSpec, Launcher
from dflop.profile.hardware import hardware_name
from dflop.records import ProfileRecord, to_dict
from dflop.store.reader import Reader

DATA_KEY, MODEL_KEY = "DATA_PROFILE_KEY", "MODEL_PROFILE_KEY"
"""Stand-ins for what is not known yet."""


def describe(config: Config, say: Say) -> Iterator[str]:
    """The resolved configuration as YAML, then every job, in the order of their submission.

    Args:
        config: Checked by `preflight`.
        say: Told what is not known yet, and what would not be submitted.

    Raises:
        LaunchError: the cluster's commands are not there.
    """
    found = runs.unfinished(config)
    run = found or RunDir(config.runs.absolute() / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    say(f"would go on with run {run.run_id}" if found else f"would begin run {run.run_id}, or one of a later second")
    resolved = found.config() if found else runs.with_absolute_paths(config)
    yield f"# {run.config_file}\n{dump_config(resolved)}"
    launcher = submit.launcher_of(run, resolved)
    for spec in _jobs(run, resolved, say):
        yield job_text(launcher, spec)


def job_text(launcher: Launcher, spec: JobSpec) -> str:
    """A job as its launcher would submit it; where that is no text (this machine), what it would start."""
    render: Callable[[JobSpec], str] | None = getattr(launcher, "render", None)
    if render is not None:
        return f"# {spec.folder / 'job.sbatch'}\n{render(spec)}"
    resources = {name: value for name, value in to_dict(spec.resources).items() if value}
    facts = {
        "job": spec.name,
        "calls": f"{spec.entry}({', '.join(map(repr, spec.args))})",
        "processes": spec.resources.num_tasks,
        "resources": resources,
        "environment": dict(spec.env),
        "key": spec.key,
        "folder": str(spec.folder),
    }
    return "\n".join([f"# backend {launcher.backend}", *(f"{name}: {json.dumps(v)}" for name, v in facts.items()), ""])


def _jobs(run: RunDir, config: Config, say: Say) -> Iterator[JobSpec]:
    key = _key("data", config.store, lambda: _data_key(config), DATA_KEY, say)
    yield from submit.data_jobs(run, config, key) if key else ()
    key = _key("model", config.store, lambda: planning.model_profile_key(config)[0], MODEL_KEY, say)
    yield from submit.model_jobs(run, config, key, _hardware(config)) if key else ()
    if run.has_plan():
        num_processes = run.plan().num_processes
    else:
        num_processes = config.cluster.spec().num_processes
        say(f"there is no plan yet: training is shown with all {num_processes} processes, a plan may take fewer")
    yield submit.train_job(run, config, TRAIN, num_processes)
    if config.compare.num_batches:
        yield submit.train_job(run, config, COMPARE, num_processes)


def _key(kind: str, store: Path, key_of: Callable[[], str], stand_in: str, say: Say) -> str:
    """Key of a profile that is to be made; empty for one that the store has."""
    try:
        key = key_of()
    except (DflopError, OSError) as error:
        say(f"the key of the {kind} profile is not known yet ({str(error).splitlines()[0]}): {stand_in} stands for it")
        return stand_in
    if (found := _stored(store, key)) is None:
        return key
    say(f"{kind} profile {key} is in the store, {found.num_rows} rows: no job")
    return ""


def _hardware(config: Config) -> str:
    label = config.cluster.hardware
    return hardware_name(config.cluster.device) if label == "auto" else label


def _data_key(config: Config) -> str:
    return profile_key(dataset_ref(config), rules_of(config))


def _stored(store: Path, key: str) -> ProfileRecord | None:
    try:
        with Reader(store) as reader:
            return reader.profile(key)
    except StoreError:  # nothing was ever published
        return None
