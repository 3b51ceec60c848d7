"""Everything that is looked at, in the order in which a run would need it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dflop.config import Config, load_problems, load_with_origins
from dflop.doctor import file_system, flow_server, installed, profile_store, slurm_cluster, this_machine, trial
from dflop.doctor.finding import FAIL, OK, WARN, Finding
from dflop.errors import DflopError
from dflop.steps.preflight import problems, remarks

CONFIGURATION = "configuration"


def examine(
    config_file: Path | None,
    overrides: Sequence[str],
    store: Path,
    ask_server: Callable[[], tuple[str, str]],
    *,
    is_tried: bool = False,
) -> Iterator[Finding]:
    """Findings, as they are made; without a configuration, those of this machine, the store and the server.

    With `is_tried` jobs are submitted to its Slurm. The store is looked for in `store` where no configuration names
    one; `ask_server` is for `flow_server`.
    """
    yield from installed.python_and_dflop()
    constraints = installed.read_constraints(Path(__file__).resolve().parents[3] / "constraints.txt")
    if constraints:
        yield installed.as_tested(constraints)
    config: Config | None = None
    if config_file is not None:
        errors: list[DflopError] = [*load_problems(config_file, overrides)]
        if not errors:
            loaded = load_with_origins(config_file, overrides)
            config, store = loaded.config, loaded.config.store
            # Checks of this machine report what it lacks.
            errors = [found.error for found in problems(config, loaded.origins) if not found.is_of_machine]
            for remark in () if errors else remarks(config, loaded.origins):
                yield Finding(CONFIGURATION, remark.where, WARN, remark.what, remark.hint)
        for error in errors:
            yield Finding(CONFIGURATION, error.where or config_file.name, FAIL, error.what, error.hint)
        if not errors:
            yield Finding(CONFIGURATION, config_file.name, OK, f"{config_file}: ok")
    here = config if config is not None and config.cluster.backend != "slurm" else None
    wants_gpu = here is not None and here.cluster.device == "cuda"
    yield from this_machine.machine(wants_gpu, here.model.attention if here else "auto")
    yield from this_machine.slow_kernels()
    yield from slurm_cluster.slurm(config)
    if is_tried and config is not None:
        yield from trial.trial(config)
    yield from flow_server.flow_server(ask_server)
    yield from profile_store.profile_store(store)
    yield from file_system.file_system("store", store)
    if config is not None:
        yield from file_system.file_system("runs", config.runs)
