"""Commands about what is around a run: its report, its configuration, its demo data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dflop.cli.common import RUNS, Runs, say

Overrides = Annotated[tuple[str, ...], Parameter(name="--set", help="Override a key, e.g. --set train.num_steps=20.")]


def demo_data(folder: Path, *, num_samples: int = 320, seed: int = 0) -> None:
    """Build the demo dataset from media that ship inside Python packages. Example: dflop demo-data data/demo."""
    from dflop.data.demo import make_demo_dataset

    made = make_demo_dataset(folder, num_samples, seed, progress=say)
    print(made.entries[0].paths[0])


def report(
    run: Annotated[str, Parameter(help="Run directory, id, beginning of one, or `latest`.")] = "latest",
    *,
    runs: Runs = RUNS,
) -> None:
    """Write report.html of a run again, from what the store knows now; print its path.

    Example: dflop report runs/demo-20261120-120000
    """
    from rich.console import Console

    from dflop.jobs.find import find_run
    from dflop.jobs.parts import report_again
    from dflop.report.terminal import print_summary

    found = find_run(run, runs)
    print_summary(report_again(found, say), Console())
    print(found.report_file)


def config(path: Path, *, overrides: Overrides = ()) -> None:
    """Show a configuration with every default filled in. Example: dflop config configs/demo.yaml."""
    from dflop.config import dump_config, load_config

    print(dump_config(load_config(path, overrides)), end="")
