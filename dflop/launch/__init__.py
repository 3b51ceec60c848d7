"""A step becomes a job, and what became of it: on Slurm or on this machine."""

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
