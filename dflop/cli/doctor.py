"""`dflop doctor`: what is installed, reachable and healthy here, and what to do about the rest."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from dflop.cli.common import DEFAULT_STORE, Json, Overrides, Store
from dflop.errors import ConfigError, printable, redacted

if TYPE_CHECKING:
    from rich.console import Console

    from dflop.doctor.finding import Finding

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def doctor(
    config: Annotated[Path | None, Parameter(help="Also check what this run configuration needs.")] = None,
    /,
    *,
    overrides: Overrides = (),
    is_tried: Annotated[
        bool, Parameter(name="--try", negative="", help="Submit a real job of seconds per kind of job to the cluster.")
    ] = False,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), help="Show only warnings and errors.")] = False,
) -> None:
    """Check packages, this machine, Slurm, Prefect and the store; say how to fix what is wrong.

    Changes nothing and, without --try, submits nothing. Exit code 1 when something does not work.

    Example: dflop doctor; dflop doctor configs/demo.yaml; dflop doctor my.yaml --try
    """
    from rich.console import Console

    from dflop.cli.server import check_server
    from dflop.config import load_config
    from dflop.doctor.examine import examine
    from dflop.doctor.finding import FAIL, OK, SKIP

    counts: Counter[str] = Counter()
    console, area = Console(highlight=False), ""
    if is_tried and (config is None or load_config(config, overrides).cluster.backend != "slurm"):
        raise ConfigError("--try needs a configuration", hint="one whose cluster.backend is slurm")
    for finding in examine(config, overrides, store, check_server, is_tried=is_tried):
        counts[finding.status] += 1
        if quiet and finding.status in (OK, SKIP):
            continue
        if as_json:
            print(json.dumps({name: redacted(getattr(finding, name)) for name in finding.__slots__}), flush=True)
            continue
        if finding.area != area:
            area = finding.area
            console.print(area, style="bold", markup=False)
        _print(finding, console)
    if not as_json:
        print(", ".join(f"{count} {status}" for status in _COLOURS if (count := counts[status])))
    if counts[FAIL]:
        sys.exit(1)


def _print(finding: Finding, console: Console) -> None:
    from rich.text import Text

    name = f"  {finding.status:<5}"
    line = Text.assemble((name, _COLOURS[finding.status]), printable(redacted(f"{finding.name}: {finding.detail}")))
    console.print(line, soft_wrap=True)
    if finding.advice and finding.status != "ok":
        console.print(Text(f"       -> {printable(redacted(finding.advice))}"), soft_wrap=True)
