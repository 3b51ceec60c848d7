"""What every command shares: where the store is, and how to talk without touching stdout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

Store = Annotated[Path, Parameter(help="Folder of the store.", env_var="DFLOP_STORE")]
DEFAULT_STORE = Path(".dflop/store")
Runs = Annotated[Path, Parameter(help="Folder of run directories.", env_var="DFLOP_RUNS")]
RUNS = Path("runs")


def say(line: str) -> None:
    """A line for people, on stderr."""
    print(line, file=sys.stderr, flush=True)
