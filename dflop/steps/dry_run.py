"""What a run would submit, word for word, without submitting or writing anything: `dflop run CONFIG --dry-run`.

Batch scripts are rendered by the code that submits them. What is not known before earlier steps have run is said in
`notes`: without a plan, training is shown on the whole cluster; without the dataset, keys of profiles are placeholders.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from dflop.config import Config, shown_config
from dflop.data.dataset_profile import profile_key
from dflop.errors import ConfigError, DflopError, LaunchError, StoreError, redacted
from dflop.launch import JobSpec
from dflop.launch.executor import Executor, batches
from dflop.launch.job import SCRIPT
from dflop.launch.payload import Payload
from dflop.launch.slurm import comment_of
from dflop.profile.groups import used_modules
from dflop.run import lifecycle
from dflop.run.batches import COMPARE, TRAIN
from dflop.run.directory import RunDir, dataset_ref, family_of
from dflop.run.messages import Say
from dflop.run.queue import site_of
from dflop.steps import planning, preflight, submit
from dflop.store.reader import Reader
from dflop.units import counted

T = TypeVar("T")


class DryJob(NamedTuple):
    """What one submission would hand over; no script where jobs are processes of this machine."""

    name: str
    script: Path | None
    text: str


class DryRun(NamedTuple):
    """What a run, taken up or new, would do: its configuration as YAML, its jobs, and what may turn out otherwise."""

    run_id: str
    is_resumed: bool
    config: str
    jobs: tuple[DryJob, ...]
    notes: tuple[str, ...]


def dry_run(config: Config) -> DryRun:
    """What `dflop run` would submit for a configuration.

    Raises:
        LaunchError: the cluster has not as many places as the plan of the run has processes.
    """
    found = lifecycle.unfinished(config)
    if found is not None:
        run, config = found, found.config()
    else:
        config = lifecycle.absolute(config)
        run = RunDir(config.runs / lifecycle.new_id(config.name))
    notes = ["finished profiles, shards and modules in the store are not submitted again"]
    groups = _groups(run, config, notes)
    jobs = [job for group in groups for job in _shown(run, config, group)]
    return DryRun(run.run_id, found is not None, shown_config(config), tuple(jobs), tuple(notes))


def forecast_dataset(config: Config, say: Say) -> str:
    """Key of the profile that `profile_dataset` would find or make; empty where the demo dataset is still to be built.

    Nothing is written.

    Raises:
        ConfigError: unknown family, or a tokenizer that lacks its tokens.
        DataError: the dataset cannot be read.
    """
    if config.dataset.demo and not config.dataset.annotations.is_file():
        say("the demo dataset would be built first; the profile's key depends on it")
        return ""
    key = profile_key(dataset_ref(config), family_of(config))
    line = f"not in the store: up to {config.data_profile.num_shards} jobs would run, {config.cluster.backend}"
    with contextlib.suppress(StoreError), Reader(config.store) as reader:
        if (found := reader.profile(key)) is not None:
            line = f"in the store: {found.num_rows} samples, {found.num_quarantined} skipped; nothing would run"
    say(line)
    return key


def script_by_hand(run: RunDir, mode: str) -> Path:
    """Path of a batch script that trains a run (`train`) or compares (`compare`) when a person submits it.

    Raises:
        ConfigError: the run has no plan, or nothing is left to train.
        LaunchError: jobs of the run are processes of this machine.
    """
    config = run.config()
    if config.cluster.backend != "slurm":
        what = f"jobs of run `{run.run_id}` are processes of this machine: there is no script to submit"
        raise LaunchError(what, where=str(run.path), hint=f"dflop train {run.run_id}")
    if not run.has_plan():
        raise ConfigError("the run has no plan yet", where=str(run.path), hint=f"dflop train {run.run_id} makes one")
    if mode == TRAIN and run.next_step() >= config.train.num_steps:
        hint = "to train more, raise train.num_steps, or set another name"
        raise ConfigError("nothing is left to train", where=str(run.path), hint=hint)
    spec = submit.train_job(run, config, mode, run.plan().num_processes)
    executor = Executor([spec], site_of(run, config), comment_of(run.run_id), is_by_hand=True)
    return executor.save(Payload("slurm", spec))


def _groups(run: RunDir, config: Config, notes: list[str]) -> list[list[JobSpec]]:
    """Jobs that are submitted together, group by group."""
    family = family_of(config)
    data_key = _or(notes, "DATA_PROFILE_KEY", lambda: profile_key(dataset_ref(config), family))
    unknown: tuple[str, str, dict[str, object]] = ("MODEL_PROFILE_KEY", config.cluster.hardware, {})
    model_key, hardware, _ = _or(notes, unknown, lambda: planning.model_profile_key(config))
    modules: Sequence[str] = preflight.modules_named(family, config)  # as far as a look at the annotations tells
    if (run.path / "shapes.parquet").is_file():
        modules = [spec.module for spec in used_modules(family, run.shapes())]
    if run.has_plan():
        num_processes = run.plan().num_processes
    else:
        num_processes = config.cluster.spec().num_processes
        notes.append("training is shown on the whole cluster; the plan decides how many processes it has")
    modes = (TRAIN, COMPARE) if config.compare.num_batches else (TRAIN,)
    return [
        submit.data_jobs(run, config, data_key, config.cluster.backend),
        submit.model_jobs(run, config, model_key, hardware, modules),
        *([submit.train_job(run, config, mode, num_processes)] for mode in modes),
    ]


def _or(notes: list[str], placeholder: T, find: Callable[[], T]) -> T:
    """What is found, or a placeholder and a note where the dataset is not there yet."""
    try:
        return find()
    except (DflopError, OSError) as error:
        reason = error.what if isinstance(error, DflopError) else str(error)
        note = f"the dataset is not there yet, so some arguments are placeholders: {reason.splitlines()[0]}"
        if note not in notes:
            notes.append(note)
        return placeholder


def _shown(run: RunDir, config: Config, specs: Sequence[JobSpec]) -> list[DryJob]:
    if config.cluster.backend == "slurm":
        site, comment = site_of(run, config), comment_of(run.run_id)
        found = [Executor([specs[n] for n in group], site, comment) for group in batches(specs)]
        return [DryJob(e.job_name, e.folder / SCRIPT, redacted(e.script_text())) for e in found]
    jobs = []
    for spec in specs:
        what = f"{counted(spec.resources.num_tasks, 'process', 'processes')} of this machine"
        text = f"{spec.name}: {what}, each runs {spec.entry} {shlex.join(spec.args)}\n"
        jobs.append(DryJob(spec.name, None, text))
    return jobs
