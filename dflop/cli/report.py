"""Commands about what is around a run: its report and its demo data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dflop.cli.common import RUNS, Quiet, Run, Runs, talk


def demo_data(
    folder: Annotated[Path, Parameter(help="Folder to make; nothing else may be in it.")],
    *,
    num_samples: Annotated[int, Parameter(help="Rows of the annotation file.")] = 320,
    seed: Annotated[int, Parameter(help="Equal seeds give equal datasets.")] = 0,
    family: Annotated[str, Parameter(help="Model family it is made for.")] = "qwen2_5_omni_thinker",
    quiet: Quiet = False,
) -> None:
    """Build the demo dataset from media inside Python packages; print its file.

    Example: dflop demo-data data/demo
    """
    from dflop.data.demo import make_demo_dataset
    from dflop.models import load_rules

    rules = load_rules(family, {}, {})
    made = make_demo_dataset(folder, num_samples, seed, progress=talk(quiet), rules=rules)
    print(made.entries[0].paths[0])


def report(
    run: Run = "latest",
    *,
    runs: Runs = RUNS,
    quiet: Quiet = False,
) -> None:
    """Write report.html of a run from what the store knows now; print its path.

    Example: dflop report latest
    """
    from rich.console import Console

    from dflop.report.terminal import print_summary
    from dflop.run.find import find_run
    from dflop.steps.reporting import report_again

    found = find_run(run, runs)
    print_summary(report_again(found, talk(quiet)), Console())
    print(found.report_file)
