"""A step becomes a submitit job, and what became of it: on Slurm or on this machine.

    JobSpecs --alike?--> Executor --Site--> job.sbatch --sbatch--> squeue, sacct, scontrol, files --Watcher--> JobStatus
                                               +--srun--> task: entry(*args) --> result, traceback, stops --explain--^

A job is a function named by reference plus string arguments, known by its id *and* its time of submission, because ids
come again. Shards of a data profile are an array; so are modules of a model profile, one array per tensor-parallel
degree. More jobs than MaxArraySize are several arrays, which wait for each other where `max_jobs_at_once` is set.
Elements that were done are kept when a sibling fails.

What is said of a job is true: why it waits and when it is expected to start, how often it was requeued, who cancelled
it, and since when squeue has not answered, which is no loss of anything. A traceback makes a job failed only once
Slurm says that it has ended, for Slurm may be about to start it again.

How the one error of a job is chosen, layer by layer: inside the job the ranks agree on a first cause
(`dflop/train/liveness.py`, `Judge.verdict`); each task leaves its result or traceback; afterwards `first_error`
(results.py) ranks them: killed by a signal, then a traceback that is no echo, then echoes, the earliest of a class;
`explain.py` knows which task srun saw die. The launcher's `collect` puts the two together.

A warning that comes before ranks listen waits for them; one that ends a task in its first millisecond, before anything
can wait, is a stop like the others. srun's exit code is 137 where one rank leaves before another, so the script goes
by the line that rank 0 leaves. srun is never told that tasks are over whose slurmstepd has died, and would hold the
nodes until the time limit: about a minute after the last result the batch script ends it.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, cast

from dflop.errors import ConfigError, did_you_mean
from dflop.launch.job import JobHandle, JobSpec, JobState, JobStatus, Launcher, LogPaths, Resources, log_paths
from dflop.launch.journal import Change, Journal
from dflop.launch.site import Container, Site
from dflop.launch.submitted import adopt_or_submit_all
from dflop.launch.wait import run_job_async, run_jobs_async, wait_all

__all__ = [
    "BACKENDS",
    "Change",
    "Container",
    "JobHandle",
    "JobSpec",
    "JobState",
    "JobStatus",
    "Journal",
    "Launcher",
    "LogPaths",
    "Resources",
    "Site",
    "adopt_or_submit_all",
    "log_paths",
    "make_launcher",
    "run_job_async",
    "run_jobs_async",
    "wait_all",
]

BACKENDS = {
    "local": "dflop.launch.local:LocalLauncher",
    "slurm": "dflop.launch.slurm:SlurmLauncher",
}
"""Imported on first use."""


def make_launcher(backend: str, **options: Any) -> Launcher:
    """Launcher of the named backend; options are the keyword arguments of its class.

    Raises:
        ConfigError: no such backend, or it has no such option.
        LaunchError: the backend cannot work on this machine.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"unknown launcher backend `{backend}`", hint=did_you_mean(backend, BACKENDS))
    module_name, _, class_name = BACKENDS[backend].partition(":")
    cls = getattr(importlib.import_module(module_name), class_name)
    valid = inspect.signature(cls).parameters
    for name in options:
        if name not in valid:
            hint = did_you_mean(name, valid) if valid else "it has none"
            raise ConfigError(f"backend `{backend}` has no option `{name}`", hint=hint)
    return cast(Launcher, cls(**options))
