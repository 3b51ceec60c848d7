"""What the command lines of benchmarks share: their options, and the process that they want to be."""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def options(doc: str | None) -> argparse.ArgumentParser:
    """A parser that has what all of them take; `doc` is the module's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    return parser


def become_a_job(module: str, **variables: str) -> None:
    """Starts `python -m module` anew with the environment of training jobs: glibc reads it when a process starts."""
    from dflop.steps.submit import CPU_ENV  # not every benchmark wants the jobs, nor torch below

    wanted = CPU_ENV | variables
    if wanted.items() - os.environ.items():
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], os.environ | wanted)


def keep_to(num_cores: int) -> None:
    """Holds this process and its children to that many cores; ends it where there are not as many."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < num_cores:
        sys.exit(f"needs {num_cores} cores, this process may use {len(cores)}")
    os.sched_setaffinity(0, cores[:num_cores])


def in_ranks(worker: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """What `worker` returns in each of some processes that reach each other over gloo."""
    from tests.train.ranks import run_ranks

    with tempfile.TemporaryDirectory(prefix="dflop-bench-") as folder:
        return run_ranks(worker, num_ranks, Path(folder), *args)
