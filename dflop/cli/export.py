"""`dflop export`: a trained model for everybody else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dflop.cli.common import Quiet, talk


def export(
    run_dir: Annotated[Path, Parameter(help="Run directory.")],
    *,
    out: Annotated[Path, Parameter(help="Folder to write; must not exist yet.")],
    quiet: Quiet = False,
) -> None:
    """Write the newest checkpoint of a run as a folder that Hugging Face's from_pretrained loads.

    Example: dflop export runs/demo-20261120-120000 --out models/demo
    """
    from dflop.jobs.export import export_run
    from dflop.jobs.rundir import open_run

    say = talk(quiet)
    step = export_run(open_run(run_dir), out, say)
    say(f"model after {step} steps")
    print(out)
