"""What is overridden of submitit is there, under these names and with these parameters, and a test of ours holds it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from submitit.local.local import Controller, LocalExecutor
from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher

from dflop.launch.controller import JobController
from dflop.launch.executor import OVERRIDDEN, Executor
from dflop.launch.local import _Executor as OurLocalExecutor
from dflop.launch.watcher import Watcher

OURS = {SlurmExecutor: Executor, SlurmInfoWatcher: Watcher, LocalExecutor: OurLocalExecutor, Controller: JobController}
THEIRS = {theirs.__name__: theirs for theirs in OURS}


@pytest.mark.parametrize("signature", OVERRIDDEN)
def test_submitit_has_what_is_overridden(signature):
    owner, _, rest = signature.partition(".")
    name, _, parameters = rest.rstrip(")").partition("(")
    found = inspect.getattr_static(THEIRS[owner], name)
    if not isinstance(found, property):
        function = getattr(found, "__func__", found)
        assert list(inspect.signature(function).parameters) == parameters.split(", ")
    assert Path(__file__).with_name(OVERRIDDEN[signature].partition(":")[0]).exists()


def test_nothing_else_of_submitit_is_overridden():
    for theirs, ours in OURS.items():
        named = {s.partition(".")[2].partition("(")[0] for s in OVERRIDDEN if s.startswith(f"{theirs.__name__}.")}
        inherited = {name for name in vars(ours) if name[:2] != "__" and hasattr(theirs, name)}
        assert inherited - {"affinity", "_abc_impl"} <= named, theirs
