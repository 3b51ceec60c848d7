"""Everything that is looked at, in the order in which a run would need it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from pathlib import Path

from dflop.config import Config, load_problems, load_with_origins
from dflop.doctor import file_system, flow_server, installed, profile_store, slurm_cluster, this_machine
from dflop.doctor.finding import FAIL, OK, Finding
from dflop.doctor.flow_server import FlowServer
from dflop.steps.preflight import problems

CONFIGURATION = "configuration"


def examine(
    config_file: Path | None,
    overrides: Sequence[str],
    store: Path,
    server: FlowServer | None,
    settings_problem: str = "",
) -> Iterator[Finding]:
    """Findings, as they are made.

    Args:
        config_file: What is wanted here; None: only what is there is told.
        overrides: Of the configuration, `a.b=value`.
        store: Folder of the store where no configuration names one.
        server: What Prefect's settings say, see `flow_server`.
        settings_problem: Why they cannot be read.
    """
    yield from installed.python_and_dflop()
    yield from installed.packages(importlib.metadata.requires("dflop") or [])
    constraints = installed.read_constraints(Path(__file__).resolve().parents[3] / "constraints.txt")
    if constraints:
        yield installed.as_tested(constraints)
    config = None
    if config_file is not None:
        found = list(_configuration(config_file, overrides))
        yield from found
        if not load_problems(config_file, overrides):
            config = load_with_origins(config_file, overrides).config
    is_local = config is not None and config.cluster.backend != "slurm"
    wants_gpu = config is not None and is_local and config.cluster.device == "cuda"
    yield from this_machine.machine(wants_gpu, config.model.attention if config and is_local else "auto")
    yield from slurm_cluster.slurm(config)
    yield from flow_server.flow_server(server, settings_problem)
    yield from profile_store.profile_store(config.store if config else store)
    yield from _folders(config, store)


def _configuration(path: Path, overrides: Sequence[str]) -> Iterator[Finding]:
    errors = list(load_problems(path, overrides))
    if not errors:
        loaded = load_with_origins(path, overrides)
        # What this machine lacks is told where it is looked at.
        of_file = [problem.error for problem in problems(loaded.config, loaded.origins) if not problem.is_of_machine]
        if not of_file:
            yield Finding(CONFIGURATION, path.name, OK, f"{path}: nothing wrong with it")
        for error in of_file:
            yield Finding(CONFIGURATION, error.where or path.name, FAIL, error.what, error.hint)
    for error in errors:
        yield Finding(CONFIGURATION, error.where, FAIL, error.what, error.hint)


def _folders(config: Config | None, store: Path) -> Iterator[Finding]:
    yield from file_system.file_system("store", config.store if config else store)
    if config is not None:
        yield from file_system.file_system("runs", config.runs)
