"""Commands about runs: the pipeline itself, its report, its demo data."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from dflop.cli.common import ConfigFile, Overrides, Quiet, talk

_PREFECT_DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    # A temporary server needs up to half a minute on a busy login node.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_LOGGING_FORMATTERS_STANDARD_FORMAT": "%(asctime)s %(message)s",
    "PREFECT_LOGGING_FORMATTERS_STANDARD_FLOW_RUN_FMT": "%(asctime)s %(message)s",
    "PREFECT_LOGGING_FORMATTERS_STANDARD_TASK_RUN_FMT": "%(asctime)s %(task_run_name)s: %(message)s",
}


def run(config: ConfigFile, *, overrides: Overrides = ()) -> None:
    """Run the whole pipeline of a configuration, or go on with an unfinished run of it.

    Uses the Prefect server of PREFECT_API_URL, or a temporary one. Example: dflop run configs/demo.yaml
    """
    from dflop.launch.kernels import kernel_environment

    os.environ |= kernel_environment(os.environ)  # before anything is imported that has kernels

    from dflop.config import load_with_origins
    from dflop.jobs import runs
    from dflop.jobs.preflight import preflight

    loaded = load_with_origins(config, overrides)
    preflight(loaded.config, loaded.origins)
    runs.check_free(loaded.config)
    for name, value in _PREFECT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    import asyncio

    from prefect.flows import load_flow_from_entrypoint
    from rich.console import Console

    from dflop import resources
    from dflop.jobs.results import load_summary
    from dflop.jobs.rundir import open_run
    from dflop.report.terminal import print_summary

    flow: Any = load_flow_from_entrypoint(
        f"{resources.path('flows') / 'pipeline.py'}:pipeline", use_placeholder_flow=False
    )
    finished = open_run(asyncio.run(flow(str(config), list(overrides))))
    print_summary(load_summary(finished), Console())
    print(f"report: {finished.report_file}", file=sys.stderr)


def demo_data(
    folder: Annotated[Path, Parameter(help="Folder to make; nothing else may be in it.")],
    *,
    num_samples: Annotated[int, Parameter(help="Rows of the annotation file.")] = 320,
    seed: Annotated[int, Parameter(help="Equal seeds give equal datasets.")] = 0,
    family: Annotated[str, Parameter(help="Model family it is made for.")] = "qwen2_5_omni_thinker",
    quiet: Quiet = False,
) -> None:
    """Build the demo dataset from media that ship inside Python packages; print its annotation file.

    Example: dflop demo-data data/demo
    """
    from dflop.data.demo import make_demo_dataset
    from dflop.models import load_rules

    rules = load_rules(family, {}, {})
    made = make_demo_dataset(folder, num_samples, seed, progress=talk(quiet), rules=rules)
    print(made.entries[0].paths[0])


def report(run_dir: Path) -> None:
    """Write report.html of a run again, from what the store knows now.

    Example: dflop report runs/demo-20261120-120000
    """
    from rich.console import Console

    from dflop.jobs.results import write_report
    from dflop.jobs.rundir import open_run
    from dflop.report.terminal import print_summary

    opened = open_run(run_dir)
    print_summary(write_report(opened), Console())
    print(opened.report_file)
