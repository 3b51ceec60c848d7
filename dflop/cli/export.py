"""`dflop export`: a trained model for everybody else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dflop.cli.common import RUNS, Quiet, Run, Runs, talk


def export(
    run: Run,
    *,
    runs: Runs = RUNS,
    out: Annotated[Path, Parameter(help="Folder to write; must not exist yet.")],
    quiet: Quiet = False,
) -> None:
    """Write a run's newest checkpoint as a folder for Hugging Face's from_pretrained.

    Example: dflop export latest --out models/demo
    """
    from dflop.jobs.checkpoint_export import export_run
    from dflop.run.find import find_run

    say = talk(quiet)
    step = export_run(find_run(run, runs), out, say)
    say(f"model after {step} steps")
    print(out)
