from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import settings

from dflop.launch.kernels import kernel_environment

# Tests and the jobs that they start share what is compiled.
os.environ |= kernel_environment(os.environ)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a tenth of what a process costs that imports dflop

# Two workers with a thread per core each wait for one another in spin loops: up to 60 times as slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shared machine makes any single example slow now and then; pytest-timeout catches what really hangs.
settings.register_profile("dflop", deadline=None)
settings.load_profile("dflop")


SLURM = "tests/slurm"


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Kernels are compiled once, before workers and their jobs would all do so at the same time."""
    if session.config.getoption("numprocesses", None):
        subprocess.run([sys.executable, "-c", "from dflop.schedule.warm import warm; warm()"], check=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, so that workers end together."""
    of_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        of_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
    slurm = [file for file in of_file if file.startswith(SLURM)]
    slow = [file for file, own in of_file.items() if any(item.get_closest_marker("slow") for item in own)]
    items[:] = [item for file in dict.fromkeys((*slurm, *slow, *of_file)) for item in of_file[file]]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker takes all tests of the one Slurm cluster: others would wait for their turn at it."""
    from xdist.scheduler import LoadFileScheduling

    class OneAtSlurm(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return SLURM if nodeid.startswith(SLURM) else super()._split_scope(nodeid)

    return OneAtSlurm(config, log) if config.getvalue("dist") == "loadfile" else None
